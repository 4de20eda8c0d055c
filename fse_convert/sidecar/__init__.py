"""The format of ``OUT/fse`` as code, in the chapters of docs/format.md: tensors, reader (files), manifest, originals."""
