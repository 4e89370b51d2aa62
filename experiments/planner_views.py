from typing import Any
def show(result: Any) -> None: pass
def draw(result: Any, path: Any) -> None: pass
