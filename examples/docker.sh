#!/usr/bin/env bash
# Build the image, and convert and verify a small checkpoint in a container that has no network, no root and a read-only root file system.
# Needs docker, or another program of the same command line: DOCKER=podman examples/docker.sh
set -euo pipefail
docker=${DOCKER:-docker}
image=${IMAGE:-fse-convert}
if ! "$docker" info > /dev/null 2>&1; then
  echo "$docker cannot build here: $("$docker" info 2>&1 | tail -n 1)" >&2
  exit 4
fi
cd "$(dirname "$0")/.."
"$docker" build --tag "$image" .

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run=("$docker" run --rm --network none --read-only --tmpfs /tmp --user "$(id -u):$(id -g)" --volume "$work:/data")
"${run[@]}" "$image" --version -v
"${run[@]}" --entrypoint python "$image" -m fse_convert.testing checkpoint --layers 2 --mtp 1 --experts 4 --hidden 512 --width 384
"${run[@]}" "$image" checkpoint converted --target vllm-0.30
"${run[@]}" "$image" verify converted --source checkpoint
"${run[@]}" "$image" restore converted original
diff --recursive "$work/checkpoint" "$work/original"
