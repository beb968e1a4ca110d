"""Ray: the same run as actors on one machine or several. Nothing else of Trireme knows of Ray."""
