"""A workbench that a program opens: it is served beside the program, and a notebook shows it in a frame."""

import threading

from gspmd_lm.explore.server import Server

FRAME_HEIGHT = 900  # pixels


class Explorer:
    """A workbench that is served until it is closed, or until the program ends."""

    def __init__(self, server: Server):
        self._server = server
        self._thread = threading.Thread(target=server.run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page, for a browser of this machine."""
        return self._server.url

    def close(self) -> None:
        """Ends the server and all that it has started."""
        self._server.close()
        self._thread.join()

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"the workbench is at {self.url}"

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.url}&amp;frame=1" style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
