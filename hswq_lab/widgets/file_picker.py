"""FilePicker: walks folders of the kernel's machine, where a browser's own file dialog cannot look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets

from hswq_lab.errors import HswqError
from hswq_lab.widgets import markup

if TYPE_CHECKING:
    from collections.abc import Callable

_UP = ".."


class FilePicker(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """A list of the folders and checkpoints in a folder; choosing one names it, "Go in" lists a folder.

    Args:
        folder: where to begin.
        chosen: called with the path of each entry that is chosen.
    """

    def __init__(self, folder: Path, chosen: Callable[[Path], None]) -> None:
        self._chosen = chosen
        self.where = ipywidgets.HTML()
        self.entries = ipywidgets.Select(description="choose", rows=8, layout={"width": "480px"})
        self.enter_button = ipywidgets.Button(
            description="Go in", icon="level-down", tooltip="list this folder"
        )
        super().__init__([self.where, ipywidgets.HBox([self.entries, self.enter_button])])
        self.entries.observe(lambda change: self._choose(change["new"]), names="value")
        self.list(folder)

    def list(self, folder: Path) -> None:
        """Lists another folder; nothing is chosen then.

        Raises:
            HswqError: it cannot be read.
        """
        found = entries_of(folder)
        self.folder = folder.resolve()
        self.where.value = markup.note(f"in {self.folder}")
        self.entries.options = found
        self.entries.value = None

    def enter(self) -> None:
        """Lists the folder that is chosen.

        Raises:
            HswqError: none is, or it cannot be read.
        """
        name = self.entries.value
        if name is None or not (self.folder / name).is_dir():
            raise HswqError("no folder is chosen", found=name, fix="choose one in the list, or press Open")
        self.list(self.folder / name)

    def _choose(self, name: str | None) -> None:
        self.enter_button.disabled = name is None or not (self.folder / name).is_dir()
        if name not in (None, _UP):
            self._chosen(self.folder / str(name))


def entries_of(folder: Path) -> dict[str, str]:
    """Label → name: the way up, the folders, the .safetensors files with their sizes; hidden ones left out.

    Raises:
        HswqError: the folder cannot be read.
    """
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        folders = {f"{path.name}/": path.name for path in inside if path.is_dir()}
        files = {
            f"{path.name} ({path.stat().st_size / 2**20:,.1f} MiB)": path.name
            for path in inside
            if path.suffix == ".safetensors" and path.is_file()
        }
    except OSError as error:
        raise HswqError("this folder cannot be read", file=folder, found=error.strerror or error) from error
    return {f"{_UP}/": _UP, **folders, **files}
