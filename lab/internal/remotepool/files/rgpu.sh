#!/bin/bash
# A stand-in for another client of remote GPUs:
#   rgpu attach --gpus N (--share PERCENT | --memory MB) [--pick KEY=VALUE]... -- COMMAND...
# It says what it was asked for and runs the command.
usage() {
  echo "rgpu: $1; usage: rgpu attach --gpus N (--share PERCENT | --memory MB) [--pick KEY=VALUE]... -- COMMAND..." >&2
  exit 2
}
[ "$1" = attach ] || usage "no command attach"
shift
gpus= share= pick=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case "$1" in
  --gpus) gpus="$2" ;;
  --share) share="$2 percent" ;;
  --memory) share="$2 MB" ;;
  --pick) pick="$pick $2" ;;
  *) usage "unknown option $1" ;;
  esac
  shift 2 || usage "$1 needs a value"
done
[ "$1" = -- ] || usage "no -- before the command"
shift
[ -n "$gpus" ] && [ -n "$share" ] && [ $# -gt 0 ] || usage "something is missing"
echo "rgpu: attached $gpus GPUs, $share of each${pick:+, picked by$pick}" >&2
export RGPU_GPUS="$gpus"
exec "$@"
