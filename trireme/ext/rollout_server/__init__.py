"""The endpoints that ms-swift's and TRL's trainers call, and the command trireme rollout."""
