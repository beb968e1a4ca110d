"""Ray: the same run as actors on one machine or several. Nothing else of Trireme knows of Ray."""

import os

# Ray prints between our lines, by the page, how each of its processes ended. Who died is said in
# one sentence, the cause is in error.log. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
