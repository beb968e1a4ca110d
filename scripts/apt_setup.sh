#!/bin/sh
# Installs a system package for the tests, unless one of its programs exists: apt_setup.sh PACKAGE
# PROGRAM... If it cannot be installed, one line says so, and tests that TRIREME_REQUIRE names fail.
set -u
package=$1
shift
found() { for program in "$@"; do command -v $program >/dev/null && return 0; done; return 1; }
found "$@" && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y install "$package"; } >/dev/null 2>&1
fi
found "$@" || echo "$package cannot be installed here (not root, or no apt-get): its tests are skipped"
