#!/usr/bin/env bash
# Runs a command as on a machine of its own, so that a second lab runs beside the first:
#
#   hack/isolated.sh COMMAND [ARG...]
#
# The command has its own processes, network, control groups and devices, and a copy of
# what a lab, a kubelet or simulated hardware change on a host: /dev, /etc, /run, /usr
# and /var. It shares all else, such as the caches of builds, and reaches the network
# through this machine. Needs root; the exit status is that of the command.
set -euo pipefail

# What is on this machine while a command runs: the packet filter table that hides the
# commands' addresses (of RFC 2544), and ip_forward as it was before.
table=divvy_isolated
network=198.19.0
before=/run/divvy-isolated

# control_groups prints the mounts of control groups: path, type and options of each.
control_groups() { awk '$3 ~ /^cgroup2?$/ {print $2, $3, $4}' /proc/mounts; }

# enter moves this shell into new control groups, which become the roots.
enter() {
  local path file
  while read -r path _; do
    mkdir "$path/$name"
    # No process may enter a cpuset without processors.
    for file in cpuset.cpus cpuset.mems; do
      [ ! -e "$path/$file" ] || cat "$path/$file" > "$path/$name/$file"
    done
    echo $BASHPID > "$path/$name/cgroup.procs"
  done < <(control_groups)
}

# connect makes a network namespace with a way out.
connect() {
  local n
  exec {lock}>"$before.lock"
  flock "$lock"
  ip netns add "$name"
  for ((n = 0; n < 64; n++)); do
    ! ip link add "divvy-iso$n" type veth peer name eth0 netns "$name" 2>/dev/null || break
  done
  ip addr add "$network.$((4 * n + 1))/30" dev "divvy-iso$n"
  ip link set "divvy-iso$n" up
  ip -n "$name" link set lo up
  ip -n "$name" addr add "$network.$((4 * n + 2))/30" dev eth0
  ip -n "$name" link set eth0 up
  ip -n "$name" route add default via "$network.$((4 * n + 1))"
  if ! nft list table ip "$table" >/dev/null 2>&1; then
    nft add table ip "$table"
    nft add chain ip "$table" out '{ type nat hook postrouting priority srcnat; }'
    nft add rule ip "$table" out ip saddr "$network.0/24" masquerade
    cat /proc/sys/net/ipv4/ip_forward > "$before"
    echo 1 > /proc/sys/net/ipv4/ip_forward
  fi
  flock -u "$lock"
}

# disconnect removes the namespace, and with the last one what was changed for them.
disconnect() {
  flock "$lock"
  ip netns del "$name" || true
  if [ -z "$(ip netns list | grep ^divvy-isolated || true)" ] && [ -e "$before" ]; then
    nft delete table ip "$table"
    cat "$before" > /proc/sys/net/ipv4/ip_forward
    rm "$before"
  fi
  flock -u "$lock"
}

leave() {
  local path deadline=$((SECONDS + 30))
  disconnect
  while read -r path _; do
    # A process that was killed leaves its group a little later.
    while [ -d "$path/$name" ] && ! find "$path/$name" -depth -type d -exec rmdir {} + 2>/dev/null; do
      [ $SECONDS -lt $deadline ] || { echo "$0: there are still processes in $path/$name" >&2; return; }
      sleep 0.1
    done
  done < <(control_groups)
  rm -rf --one-file-system "$dir"
}

# copy_folders gives the command what it may change, as it is now.
copy_folders() {
  # A lab keeps its images in /var, which overlayfs cannot hold.
  cp -a --one-file-system /var "$dir/var"
  mount --bind "$dir/var" /var
  mkdir "$dir"/{etc,usr}{,.work}
  for folder in etc usr; do
    mount -t overlay -o "lowerdir=/$folder,upperdir=$dir/$folder,workdir=$dir/$folder.work" overlay "/$folder"
  done
  mount -t tmpfs -o mode=755 run /run
}

make_devices() {
  local device
  mkdir /run/dev
  mount -t tmpfs -o mode=755 dev /run/dev
  for device in null zero full random urandom tty kmsg fuse; do
    [ ! -e /dev/$device ] || cp -a /dev/$device /run/dev/
  done
  mkdir /run/dev/{pts,shm}
  mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts /run/dev/pts
  mount -t tmpfs -o mode=1777 shm /run/dev/shm
  ln -s pts/ptmx /run/dev/ptmx
  ln -s /proc/self/fd /run/dev/fd
  for device in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${device%:*}" "/run/dev/${device#*:}"; done
  mount --rbind /run/dev /dev
}

mount_control_groups() {
  local mounts path kind options
  mounts=$(control_groups)
  mount -t sysfs sys /sys
  mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
  while read -r path kind options; do
    # Only the names of the controllers are options of the new mount.
    options=$(tr , '\n' <<<"$options" | sed -E '/^(ro|rw|relatime|nosuid|nodev|noexec|nsdelegate|memory_recursiveprot)$/d' | paste -sd,)
    mkdir -p "$path"
    mount -t "$kind" ${options:+-o "$options"} cgroup "$path"
  done <<<"$mounts"
}

if [ -z "${DIVVY_ISOLATED:-}" ]; then
  [ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARG...]" >&2; exit 2; }
  [ ! -e /var/lib/divvy-lab ] || { echo "$0: a lab is up on this machine and would be copied; take it down first: make lab-down" >&2; exit 1; }
  dir=$(mktemp -d -t divvy-isolated.XXXXXX)
  name=${dir##*/}
  trap leave EXIT
  connect
  ( enter && DIVVY_ISOLATED=$dir exec nsenter --net="/run/netns/$name" unshare --mount --pid --ipc --uts --cgroup --fork --kill-child --mount-proc "$0" "$@" ) <&0 &
  # Unshare ignores what ends this shell. With unshare, all processes of the command end.
  trap 'kill -KILL "$!"' INT TERM
  status=0
  wait "$!" || status=$?
  exit "$status"
else
  dir=$DIVVY_ISOLATED
  unset DIVVY_ISOLATED
  mount --make-rprivate /
  copy_folders
  make_devices
  mount_control_groups
  # Kubelet and containerd pass mounts on to each other.
  mount --make-rshared /
  # This shell reaps processes whose parents have ended.
  "$@"
fi
