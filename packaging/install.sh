#!/bin/sh
# Installs moored from a release into your home, without root; removes it again.
#
#   sh install.sh                           into ~/.local
#   sh install.sh --prefix /opt/moored      elsewhere
#   sh install.sh --from ADDRESS            from another address or a folder with the files of a release
#   sh install.sh --remove                  removes what it installed; jobs, tokens and models stay
#   sh install.sh --force                   replaces a program that it did not install
#
# It checks the archive against SHA256SUMS of the release, needs a Linux of x86-64 with the C library of 2021 or newer
# (Debian 12, Ubuntu 22.04, RHEL 9), and curl or wget. An older or newer version is installed over the one that is there.
set -eu

version=@VERSION@
glibc=@GLIBC@
from=${MOORED_RELEASES:-@ADDRESS@}
archive="moored-$version-x86_64-linux.tar.gz"
prefix=$HOME/.local
remove=no
force=no

say() { printf '%s\n' "$*"; }
fail() { say "install.sh: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
  case $1 in
    --prefix) [ $# -gt 1 ] || fail "--prefix needs a folder"; prefix=$2; shift ;;
    --from) [ $# -gt 1 ] || fail "--from needs an address or a folder"; from=$2; shift ;;
    --remove) remove=yes ;;
    --force) force=yes ;;
    -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p;}' "$0"; exit ;;
    *) fail "there is no option $1: --prefix FOLDER, --from ADDRESS, --remove, --force" ;;
  esac
  shift
done

case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
list=$prefix/share/moored/installed-files

# Removes the files that a list names, and folders that are empty after that.
remove_listed() {
  while IFS= read -r file; do
    case $file in "" | /* | *..*) continue ;; esac # only what lies below the prefix
    rm -f "$prefix/$file"
    folder=$(dirname "$file")
    while [ "$folder" != . ] && rmdir "$prefix/$folder" 2> /dev/null; do folder=$(dirname "$folder"); done
  done
}

if [ "$remove" = yes ]; then
  [ -f "$list" ] || fail "$prefix has no moored that this script installed"
  listed=$(cat "$list")
  say "$listed" | remove_listed
  say "Removed moored from $prefix."
  say "Kept: jobs and tokens in ${XDG_STATE_HOME:-$HOME/.local/state}/moored, settings in ${XDG_CONFIG_HOME:-$HOME/.config}/moored,"
  say "and models in the hub cache. \`rm -r\` removes them."
  exit
fi

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || fail "this release is for Linux on x86-64; here is $(uname -s) on $(uname -m)"
here=$(getconf GNU_LIBC_VERSION 2> /dev/null | sed 's/^glibc //') || here=
[ -n "$here" ] || fail "the program needs glibc $glibc or newer, and this system has another C library"
newest=$(printf '%s\n%s\n' "$here" "$glibc" | sort -t. -k1,1n -k2,2n | tail -n 1)
[ "$newest" = "$here" ] || fail "the program needs glibc $glibc or newer, and this system has $here"
[ -n "$from" ] || fail "say where the files of the release are: --from ADDRESS, or a folder"
if [ "$force" = no ] && [ ! -f "$list" ] && [ -e "$prefix/bin/moored" ]; then
  fail "$prefix/bin/moored is there, and this script did not install it: --force replaces it, --prefix installs elsewhere"
fi

mkdir -p "$prefix"
new=$(mktemp -d "$prefix/.moored-XXXXXX")
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM

# fetch NAME: a file of the release, into the folder of the new version.
fetch() {
  case $from in
    http://* | https://*)
      if command -v curl > /dev/null; then
        # A bar for a person at a terminal, and nothing in a pipe.
        if [ -t 2 ]; then shown=--progress-bar; else shown=--silent; fi
        curl --fail --location --show-error $shown --output "$new/$1" "$from/$1"
      elif command -v wget > /dev/null; then
        wget --quiet --output-document "$new/$1" "$from/$1"
      else
        fail "install curl or wget first"
      fi ;;
    *) cp "${from#file://}/$1" "$new/$1" ;;
  esac || fail "$from/$1 cannot be read"
}

say "Fetching moored $version from $from"
fetch SHA256SUMS
fetch "$archive"
line=$(grep " [ *]\{0,1\}$archive\$" "$new/SHA256SUMS") || fail "SHA256SUMS of $from does not name $archive"
(cd "$new" && printf '%s\n' "$line" | sha256sum --check --status) ||
  fail "$archive is not what SHA256SUMS of $from says: nothing was installed"
(cd "$new" && tar -xzf "$archive")
root=$new/moored-$version-x86_64-linux
"$root/bin/moored" --version > /dev/null || fail "the program does not start on this machine: nothing was installed"

# Each file takes its place at once: a service that runs goes on with the program that it was started from.
(cd "$root" && find . -type f | sed 's|^\./||' | LC_ALL=C sort) > "$new/files"
say "share/moored/installed-files" >> "$new/files"
was=
[ ! -f "$list" ] || was=$(cat "$list")
while IFS= read -r file; do
  [ "$file" != share/moored/installed-files ] || continue
  mkdir -p "$prefix/$(dirname "$file")"
  mv -f "$root/$file" "$prefix/$file"
done < "$new/files"
# What the version before had and this one has not.
printf '%s\n' "$was" | grep -vxF -f "$new/files" | remove_listed || true
mv -f "$new/files" "$list"

say "Installed moored $version: $prefix/bin/moored, and the models of the demo, manual pages and completions in $prefix/share."
case ":$PATH:" in
  *":$prefix/bin:"*) command=moored ;;
  *) command=$prefix/bin/moored; say "$prefix/bin is not in PATH: add it, or write the whole path." ;;
esac
say "Try it:    $command demo"
say "Remove it: sh install.sh --prefix $prefix --remove"
