# The extension module; src/bindings says what is in it.
from typing import Any

def __getattr__(name: str) -> Any: ...
