#!/bin/sh
# PostgreSQL of the system's packages, for the tests; says in one line where it cannot be had.
set -u
found() { command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; }
found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y install postgresql; } >/dev/null 2>&1
fi
found || echo "PostgreSQL cannot be installed here (not root, or no apt-get): its tests are skipped"
