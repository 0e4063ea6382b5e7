"""A Sokoban room, the state of player and boxes in it, and moves.

Cells are numbered row by row; sets of cells are bits of an integer, so that a move is a few additions. The outermost cells are walls, so
no move has to check for the edge.

    ######    # wall      O target     √ box on a target
    #_PX_#    _ floor     X box        S player on a target
    #__O_#    P player
    ######
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = "#_O√XPS"
SYMBOLS = {
    WALL: "wall",
    FLOOR: "floor",
    TARGET: "target",
    BOX_ON_TARGET: "box on a target",
    BOX: "box",
    PLAYER: "player",
    PLAYER_ON_TARGET: "player on a target",
}
"""What each symbol of a board stands for; the usual ones in language-model benchmarks (RAGEN)."""

State = tuple[int, int]
"""The player's cell, and the bits of the boxes' cells."""


class Move(StrEnum):
    """One step of the player, named as answers name it."""

    UP = "Up"
    DOWN = "Down"
    LEFT = "Left"
    RIGHT = "Right"

    # Faster than an enum's own hash, which is written in Python; moves are looked up at every step.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The fixed part of a board. `walls`, `targets`: bits of cells."""

    width: int
    height: int
    walls: int
    targets: int

    def deltas(self) -> dict[Move, int]:
        """The change of the cell number by each move."""
        return {Move.UP: -self.width, Move.DOWN: self.width, Move.LEFT: -1, Move.RIGHT: 1}

    def is_solved(self, state: State) -> bool:
        """Whether every box is on a target."""
        return not state[1] & ~self.targets


def moved(room: Room, state: State, delta: int) -> State:
    """The state after a move by `delta`; unchanged if a wall, or a box that cannot be pushed, is in the way."""
    player, boxes = state
    ahead = player + delta
    bit = 1 << ahead
    if room.walls & bit:
        return state
    if boxes & bit:
        behind = 1 << (ahead + delta)
        if (room.walls | boxes) & behind:
            return state
        return ahead, boxes ^ bit | behind
    return ahead, boxes


def drawn(room: Room, state: State) -> str:
    """The board as rows of symbols, joined by newlines."""
    player, boxes = state
    symbols = list(_empty(room))
    width, targets = room.width, room.targets
    symbols[player + player // width] = PLAYER_ON_TARGET if targets >> player & 1 else PLAYER
    while boxes:
        bit = boxes & -boxes
        cell = bit.bit_length() - 1
        symbols[cell + cell // width] = BOX_ON_TARGET if targets & bit else BOX
        boxes ^= bit
    return "".join(symbols)


@lru_cache(maxsize=1_024)
def _empty(room: Room) -> str:
    """The room without player and boxes, rows joined by newlines."""
    cells = [1 << cell for cell in range(room.width * room.height)]
    line = "".join(WALL if room.walls & bit else TARGET if room.targets & bit else FLOOR for bit in cells)
    return "\n".join(line[start : start + room.width] for start in range(0, len(line), room.width))


def inside(board: str) -> str:
    """A drawn board without its outer walls."""
    return "\n".join(row[1:-1] for row in board.split("\n")[1:-1])


def read_board(text: str) -> tuple[Room, State]:
    """The room and the state that `drawn` drew.

    Raises ValueError for rows of unequal length, unknown symbols, an open edge, not exactly one player, or more boxes than targets.
    """
    rows = text.split("\n")
    width = len(rows[0])
    if len({len(row) for row in rows}) != 1 or width < 3 or len(rows) < 3:
        raise ValueError("A board has at least three rows of three symbols, all of the same length.")
    cells = "".join(rows)
    unknown = set(cells) - set(SYMBOLS)
    if unknown:
        raise ValueError(f"A board has no symbol {min(unknown)!r}; there are {''.join(SYMBOLS)}.")

    def bits(symbols: str) -> int:
        return sum(1 << cell for cell, symbol in enumerate(cells) if symbol in symbols)

    players = [cell for cell, symbol in enumerate(cells) if symbol in (PLAYER, PLAYER_ON_TARGET)]
    room = Room(width=width, height=len(rows), walls=bits(WALL), targets=bits(TARGET + BOX_ON_TARGET + PLAYER_ON_TARGET))
    state = (players[0] if players else 0, bits(BOX + BOX_ON_TARGET))
    if any(symbol != WALL for row in (rows[0], rows[-1]) for symbol in row) or any(row[0] + row[-1] != WALL * 2 for row in rows):
        raise ValueError("A board is closed by walls on every side.")
    if len(players) != 1:
        raise ValueError(f"A board has one player, not {len(players)}.")
    if state[1].bit_count() > room.targets.bit_count() or not state[1]:
        raise ValueError("A board has at least one box, and no more boxes than targets.")
    return room, state
