#!/bin/sh
# fse-convert on NFS 4.2 and 3, served and mounted by a user-mode Linux of its own: no kernel module of this machine is needed.
# Needs root and the packages user-mode-linux, nfs-kernel-server, kmod and iproute2. Usage: run.sh FSE_CONVERT CHECKPOINT
# Prints a line per trial; exits with 1 unless every line says ok.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
for tool in linux.uml rpc.nfsd mount.nfs modprobe ip; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" "$2" "$work/padded" >/dev/null 2>&1
"$1" "$2" "$work/carried" --target megamoe-128 >/dev/null 2>&1
sed "s|@CONVERT@|$(realpath "$1")|; s|@CHECKPOINT@|$(realpath "$2")|; s|@GOLDEN@|$work|" "$here/guest.sh" >"$work/guest.sh"
linux.uml mem=4G root=/dev/root rootfstype=hostfs rootflags=/ ro quiet init=/bin/sh con=null con0=fd:0,fd:1 -- "$work/guest.sh" \
  </dev/null 2>&1 | grep --line-buffered -a '^nfs' | tee "$work/log"
grep -q '^nfs: end' "$work/log" && ! grep -qv ': ok\|: end' "$work/log"
