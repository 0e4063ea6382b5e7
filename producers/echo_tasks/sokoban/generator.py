"""Boards that can be solved, by playing backwards: every box starts on its target and is pulled away.

The search backwards goes breadth first, so each state is found at its true distance: the fewest moves that solve it. A board is a state
at a wanted distance, with no box on a target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from echo_schemas.errors import UserError
from echo_tasks.sokoban.board import Move, Room, State

LARGEST_SIDE = 20
# 6×6 with 2 boxes has at most 1,680 states. Larger boards have millions; the nearest ones to the solution are enough.
_MAX_STATES = 20_000
# A carved room may have no state at the wanted distance. After so many rooms without one the recipe counts as impossible.
_MAX_ROOMS = 500
_TURN = 0.35
"""How often the carving walk changes its direction; gym-sokoban's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What boards to make. `width` and `height`: from 4 to `LARGEST_SIDE`, walls included. `min_moves` and `max_moves` bound the shortest
    solution. Of the inner cells a share in `floor` is no wall.
    """

    width: int
    height: int
    boxes: int
    min_moves: int
    max_moves: int
    floor: tuple[float, float]

    def __post_init__(self) -> None:
        """Raises UserError for a recipe that no room can follow."""
        inner = (self.width - 2) * (self.height - 2)
        most = (inner - 1) // 2
        if self.boxes > most:
            raise UserError(
                f"{self.boxes} boxes do not fit on a Sokoban board of {self.width}×{self.height}.",
                hint=f"It takes 1 to {most}: each needs its target beside it, and the player a cell." if most else "Make the board larger.",
            )
        low, high = self.floor
        if not 0 < low <= high <= 1:
            raise UserError(f"floor = [{low}, {high}] is no range of shares.", hint="Write it as [0.5, 0.9]: 0 < lowest ≤ highest ≤ 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One board and a shortest solution."""

    room: Room
    state: State
    solution: tuple[Move, ...]


Plan = Mapping[State, tuple[int, Move | None, State]]
"""For each state: the fewest moves to the solution, the first of them (None where it is solved), and the state it leads to."""


def make_level(rng: random.Random, recipe: Recipe) -> Level:
    """A board as `recipe` says. Raises UserError if it asks for what rooms of this size do not have."""
    for _ in range(_MAX_ROOMS):
        room = _carved(rng, recipe)
        if room is None:
            continue
        plan = search_back(room, max_moves=recipe.max_moves)
        candidates: dict[int, list[State]] = {}
        for state, (distance, _, _) in plan.items():
            if distance >= recipe.min_moves and not state[1] & room.targets:
                candidates.setdefault(distance, []).append(state)
        if candidates:
            # Draw the distance first, then the state: otherwise most boards would be of the most frequent distances.
            state = rng.choice(candidates[rng.choice(sorted(candidates))])
            return Level(room=room, state=state, solution=tuple(solution(plan, state)))
    raise UserError(
        f"No Sokoban board of {recipe.width}×{recipe.height} with {recipe.boxes} boxes has a shortest solution of {recipe.min_moves} to "
        f"{recipe.max_moves} moves.",
        hint="Lower the first of `moves`, raise the second, or make the board larger.",
    )


def search_back(room: Room, *, max_moves: int) -> Plan:
    """Every state that can be solved in at most `max_moves`, by its true distance; the nearest 20,000 of them if there are more."""
    deltas = room.deltas()
    cells = [cell for cell in range(room.width * room.height) if not room.walls >> cell & 1]
    frontier: list[State] = [(cell, room.targets) for cell in cells if not room.targets >> cell & 1]
    found: dict[State, tuple[int, Move | None, State]] = {state: (0, None, state) for state in frontier}
    for distance in range(1, max_moves + 1):
        reached: list[State] = []
        for state in frontier:
            player, boxes = state
            blocked = room.walls | boxes
            for move, delta in deltas.items():
                before = player - delta
                if blocked >> before & 1:
                    continue
                earlier: State = (before, boxes)
                if earlier not in found:
                    found[earlier] = (distance, move, state)
                    reached.append(earlier)
                # The move may also have pushed the box that now stands ahead.
                ahead = 1 << (player + delta)
                if boxes & ahead:
                    earlier = (before, boxes ^ ahead | 1 << player)
                    if earlier not in found:
                        found[earlier] = (distance, move, state)
                        reached.append(earlier)
            if len(found) >= _MAX_STATES:
                return found
        frontier = reached
    return found


def solution(plan: Plan, state: State) -> Iterator[Move]:
    """The moves of a shortest solution from `state`, which is in `plan`."""
    _, move, following = plan[state]
    while move is not None:
        yield move
        _, move, following = plan[following]


def _carved(rng: random.Random, recipe: Recipe) -> Room | None:
    """A room dug by a random walk, with targets on some of its floor; None if the walk dug too few cells."""
    width, height = recipe.width, recipe.height
    inner = [row * width + column for row in range(1, height - 1) for column in range(1, width - 1)]
    allowed = set(inner)
    wanted = max(2 * recipe.boxes + 1, round(rng.uniform(*recipe.floor) * len(inner)))
    here = rng.choice(inner)
    dug = {here}
    delta = rng.choice((-width, width, -1, 1))
    # Enough steps for the walk to reach every cell of the largest board.
    for _ in range(8 * len(inner) * len(inner)):
        if len(dug) >= wanted:
            break
        if rng.random() < _TURN or here + delta not in allowed:
            delta = rng.choice((-width, width, -1, 1))
        if here + delta in allowed:
            here += delta
            dug.add(here)
    else:
        return None
    floor = sum(1 << cell for cell in dug)
    targets = sum(1 << cell for cell in rng.sample(sorted(dug), recipe.boxes))
    return Room(width=width, height=height, walls=((1 << width * height) - 1) & ~floor, targets=targets)
