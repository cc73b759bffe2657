"""What authors of methods test them with: the contract laws, and tiny random models that need no files and no network.

Each ``check_…`` function holds one method to the laws that all of Rasura's own methods keep: ``tests/test_contracts.py``
calls the same laws for every method of the registry. A broken law raises ``AssertionError``.
"""

from rasura.testing.attacks import check_attack
from rasura.testing.defenses import check_defense
from rasura.testing.metrics import check_metric
from rasura.testing.services import check_service_attack, check_service_protection

__all__ = ["check_attack", "check_defense", "check_metric", "check_service_attack", "check_service_protection"]
