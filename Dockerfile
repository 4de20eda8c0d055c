# fse-convert with a CPU build of torch, for jobs that inspect, convert, verify and restore: no GPU, no root.
# docker build --tag fse-convert . && docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/data" fse-convert inspect checkpoint
FROM python:3.13-slim-trixie AS packages
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/fse-convert
ENV PATH=/opt/fse-convert/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install "torch==${TORCH}" --index-url "${TORCH_INDEX}"
COPY . /src
RUN pip install "/src[hub]"

FROM python:3.13-slim-trixie
COPY --from=packages /opt/fse-convert /opt/fse-convert
ENV PATH=/opt/fse-convert/bin:$PATH HF_HOME=/data/.cache/huggingface
RUN useradd --uid 10001 --no-create-home convert
USER 10001
WORKDIR /data
ENTRYPOINT ["fse-convert"]
CMD ["--help"]
