"""The targets by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping

from fuzz.target import Target
from fuzz.targets.data import Data
from fuzz.targets.formats import Formats
from fuzz.targets.keys import Keys
from fuzz.targets.plans import Plans
from fuzz.targets.requests import Requests
from fuzz.targets.stores import Stores
from fuzz.targets.updates import Updates
from fuzz.targets.uploads import Containers, Uploads
from fuzz.targets.wire import Wire

TARGETS: Mapping[str, type[Target]] = {
    target.name: target for target in (Wire, Keys, Plans, Containers, Uploads, Requests, Stores, Updates, Formats, Data)
}
"""Their shares add up to 1,000."""
