"""A workbench that a program opens: it is served beside the program, and a notebook shows it in a frame."""

import threading

from gspmd_lm.explore.server import Server
from gspmd_lm.explore.workbench import Workbench

FRAME_HEIGHT = 900  # pixels


class Explorer(Server):
    """A workbench that is served until it is closed, or until the program ends."""

    def __init__(self, workbench: Workbench, port: int = 0):
        super().__init__(workbench, port)
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server and all that it has started."""
        super().close()
        self._thread.join()

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"the workbench is at {self.url}"

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.url}&amp;frame=1" style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
