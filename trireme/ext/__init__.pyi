"""What `from trireme import ...` finds in extensions, for type checkers and editors.

Written by scripts/extension_names.py.
"""

from trireme.ext.evaluation.trial import Trial as Trial
from trireme.ext.evaluation.trial import try_workflow as try_workflow
from trireme.ext.multi_turn.gym_scheduler import ContextManager as ContextManager
from trireme.ext.multi_turn.gym_scheduler import Env as Env
from trireme.ext.multi_turn.scheduler import ChatMessage as ChatMessage
from trireme.ext.multi_turn.scheduler import MultiTurnScheduler as MultiTurnScheduler
from trireme.ext.multi_turn.scheduler import RolloutInferRequest as RolloutInferRequest
from trireme.ext.multi_turn.scheduler import RolloutOutput as RolloutOutput
from trireme.ext.multi_turn.scheduler import RolloutResponseChoice as RolloutResponseChoice
from trireme.ext.train.train import Run as Run
from trireme.ext.train.train import train as train
