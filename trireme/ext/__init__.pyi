"""What `from trireme import ...` finds in extensions, for type checkers and editors.

Written by scripts/extension_names.py.
"""

from trireme.ext.evaluation.trial import Trial as Trial
from trireme.ext.evaluation.trial import try_workflow as try_workflow
from trireme.ext.train.train import Run as Run
from trireme.ext.train.train import train as train
