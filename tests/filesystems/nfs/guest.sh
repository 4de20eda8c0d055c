#!/bin/sh
# What run.sh runs as the first process of its guest: the host's files, read only, and an ext4 in memory that is served by NFS.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run PYTHONDONTWRITEBYTECODE=1
CONVERT=@CONVERT@ SOURCE=@CHECKPOINT@ GOLDEN=@GOLDEN@

serve() {
  mount -t proc proc /proc
  mount -t sysfs sys /sys
  for folder in /run /mnt /var/lib/nfs; do mount -t tmpfs tmpfs $folder; done
  mkdir -p /mnt/lib /mnt/disk /mnt/a /mnt/b /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm
  touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
  ln -s /usr/lib/uml/modules /mnt/lib/modules
  for module in loop sunrpc lockd nfs nfsv3 nfsv4 nfsd; do modprobe -d /mnt $module; done
  ip link set lo up
  mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
  mount -t nfsd nfsd /proc/fs/nfsd
  rpcbind -w
  rpc.statd
  truncate -s 900M /mnt/image
  mkfs.ext4 -q /mnt/image
  mount -o loop /mnt/image /mnt/disk
  exportfs -o rw,no_root_squash,no_subtree_check,fsid=0,insecure 127.0.0.1:/mnt/disk
  rpc.nfsd -G 10 -L 10 8 # seconds of grace and of leases
  rpc.mountd
} >/dev/null 2>&1

# check NAME EXPECTED_CODE CODE [GOLDEN OUT]: the exit code, the bytes, and nothing left beside them.
check() {
  said=ok
  [ "$2" = "$3" ] || said="exit $3, expected $2"
  [ $# = 3 ] || diff -r "$4" "$5" >/dev/null || said="$said; other bytes"
  left=$(ls -A $at | grep '^\.' | tr '\n' ' ')
  [ -z "$left" ] || said="$said; left $left"
  echo "nfs $version, $1: $said"
  [ "$said" = ok ] || grep -sA 2 '^error' /run/log /run/first /run/second | sed 's/^/nfs: /'
}

convert() { "$CONVERT" "$@" >/run/log 2>&1; }

# mount_nfs VERSION FOLDER
mount_nfs() {
  [ $1 = 3 ] && share=/mnt/disk || share=/
  mount -t nfs -o vers=$1,nosharecache 127.0.0.1:$share $2
}

every_command() {
  convert $at/s $at/o; check "convert" 0 $? $GOLDEN/padded $at/o
  convert $at/s $at/o; check "convert again" 2 $? $GOLDEN/padded $at/o
  convert $at/s $at/o --overwrite; check "overwrite" 0 $? $GOLDEN/padded $at/o
  convert verify $at/o --source $at/s; check "verify" 0 $?
  convert restore $at/o $at/r; check "restore" 0 $? $at/s $at/r
  for link in auto copy hard; do
    convert $at/s $at/$link --target megamoe-128 --link $link; check "link $link" 0 $? $GOLDEN/carried $at/$link
  done
  rm -rf $at/auto $at/copy $at/hard $at/r $at/o
}

# Kill runs after so many files are staged, then let one end.
killed() {
  for files in 1 3 6; do
    "$CONVERT" $at/s $at/o >/dev/null 2>&1 &
    while kill -0 $! 2>/dev/null && [ "$(ls $at/.o.fse-partial/output 2>/dev/null | wc -l)" -lt $files ]; do sleep 0.05; done
    kill -9 $!
    wait $! 2>/dev/null
  done
  convert $at/s $at/o; check "killed three times, then resumed" 0 $? $GOLDEN/padded $at/o
  rm -rf $at/o
}

# Two clients that share no cache begin at once: one converts, the other is refused.
two() {
  rm -f /run/log
  "$CONVERT" /mnt/a/s /mnt/a/o >/run/first 2>&1 &
  first=$!
  "$CONVERT" /mnt/b/s /mnt/b/o >/run/second 2>&1
  second=$?
  wait $first
  codes="$?, $second"
  case $codes in "0, 6" | "6, 0" | "0, 2" | "2, 0") codes=right ;; esac
  check "two at once ($1)" right "$codes" $GOLDEN/padded /mnt/disk/o
}

# The other client removes the folder of unfinished work: there is no output then, or a whole one.
removed() {
  rm -f /run/log
  "$CONVERT" /mnt/a/s /mnt/a/o >/run/first 2>&1 &
  while kill -0 $! 2>/dev/null && [ "$(ls /mnt/b/.o.fse-partial/output 2>/dev/null | wc -l)" -lt 3 ]; do sleep 0.05; done
  rm -rf /mnt/b/.o.fse-partial 2>/dev/null
  wait $!
  code=$?
  [ $code = 0 ] || rm -rf /mnt/disk/.o.fse-partial
  case $code in 0) check "staging removed by another client ($1)" 0 0 $GOLDEN/padded /mnt/disk/o ;; *)
    [ ! -e /mnt/disk/o ] || code="$code and an output"
    check "staging removed by another client ($1)" 4 "$code" ;;
  esac
}

serve
for version in 4.2 3; do
  at=/mnt/a
  mount_nfs $version $at
  rm -rf $at/s
  cp -r "$SOURCE" $at/s
  every_command
  killed
  umount $at
done
at=/mnt/disk # where trials of two clients are looked at: a client answers from memory for seconds
for pair in "4.2 3" "4.2 4.2" "3 3"; do
  version=${pair% *}
  for trial in two two two removed removed removed; do
    mount_nfs ${pair% *} /mnt/a
    mount_nfs ${pair#* } /mnt/b
    $trial "$pair"
    umount /mnt/a /mnt/b
    rm -rf /mnt/disk/o
  done
done
echo "nfs: end"
sync
halt -f
