"""Reads what `nvdisasm -gi -hex -c` prints, and follows loads from global memory up to a kernel's first barrier."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

# ---- reading ----

Line = tuple[str, int]
"""A file and a line in it."""


@dataclass
class Instruction:
    address: int
    guard: str  # "@!P0 ", or nothing
    opcode: str  # with its modifiers
    operands: list[str]
    lines: tuple[Line, ...]  # lines of the source, innermost first: each is inlined at the next
    control: int = 0  # see below

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.guard}{self.opcode} {', '.join(self.operands)}".rstrip()

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    # From Volta on, an instruction has 21 bits for the scheduler above its operation: how long to stall (4), yield (1), the
    # scoreboard that it holds until its result is written (3), the one until its operands are read (3), which it waits for (6).
    @property
    def writes_scoreboard(self) -> int | None:
        number = self.control >> 5 & 7
        return None if number == 7 else number

    @property
    def waits_for(self) -> set[int]:
        waited = {i for i in range(6) if self.control >> 11 >> i & 1}
        # Waits until a scoreboard has come down to a number: the loads behind it are then unknown.
        if self.name == "DEPBAR":
            waited |= {int(number) for number in re.findall(r"\bSB(\d)", ", ".join(self.operands))}
        return waited

    @property
    def label(self) -> str | None:
        found = re.search(r"`\((.+?)\)", ", ".join(self.operands))
        return found[1] if found else None


@dataclass
class Function:
    """A kernel, and what it calls: one section of code."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction that follows

    @property
    def bytes(self) -> int:
        return 16 * len(self.instructions)


SECTION = re.compile(r"\s*\.section\s+\.text\.([^,]+),")
LABEL = re.compile(r"([.$\w]+):\s*$")
SOURCE = re.compile(r'\s*//## File "([^"]+)", line (\d+)( inlined at)?')
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*([^;]*?)\s*;\s*(?:/\*.*\*/)?\s*$")
SECOND_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")


def operands_of(text: str) -> list[str]:
    """Between commas that are in no brackets."""
    return [part.strip() for part in re.split(r",(?![^\[(]*[\])])", text) if part.strip()]


def read(text: Iterable[str]) -> Iterator[Function]:
    function: Function | None = None
    lines: tuple[Line, ...] = ()
    inner: list[Line] = []
    for row in text:
        if found := SOURCE.match(row):
            inner.append((found[1], int(found[2])))
            if not found[3]:
                lines, inner = tuple(inner), []
        elif found := SECTION.match(row):
            if function is not None:
                yield function
            function, lines = Function(found[1]), ()
        elif function is None:
            continue
        elif found := INSTRUCTION.match(row):
            function.instructions.append(Instruction(int(found[1], 16), found[2] or "", found[3], operands_of(found[4]), lines))
        elif found := SECOND_HALF.match(row):
            function.instructions[-1].control = int(found[1], 16) >> 41
        elif found := LABEL.match(row):
            function.labels[found[1]] = len(function.instructions)
    if function is not None:
        yield function


# ---- registers ----

REGISTER = re.compile(r"(?<![\w.])(U?[RP])(\d+)((?:\.\w+)*)")
WIDTH = re.compile(r"\.[SUB]?(64|96|128)\b")
STORES = {"ST", "STG", "STS", "STL", "RED", "REDG", "REDS"}
WITHOUT_RESULT = STORES | {"BAR", "BRA", "BREAK", "BSYNC", "EXIT", "NANOSLEEP", "SYNCS", "WARPSYNC"}
ONE_PREDICATE = {"ATOM", "ATOMG", "ATOMS", "LOP3", "SHFL", "MATCH"}
"""Instructions that may have a predicate before the register that they write."""


def width_of(instruction: Instruction) -> int:
    """How many registers the data of a load, a store or an atomic operation have."""
    found = WIDTH.search(instruction.opcode)
    return int(found[1]) // 32 if found else 1


def registers_in(operand: str, width: int = 1) -> set[str]:
    found = set()
    for kind, number, modifiers in REGISTER.findall(operand):
        many = 1 if kind.endswith("P") else max(width, 2 if ".64" in modifiers else 1)
        found |= {f"{kind}{int(number) + i}" for i in range(many)}
    return found


def is_load(instruction: Instruction) -> bool:
    """From global memory, or from an address that may be there; and atomic operations that return what was there."""
    return instruction.name in {"LDG", "LD", "ATOMG", "ATOM"}


def split(instruction: Instruction) -> tuple[set[str], set[str]]:
    """The registers that it writes, and those that it reads."""
    written: set[str] = set()
    read = registers_in(instruction.guard)
    operands = list(instruction.operands)
    width = width_of(instruction)
    memory = instruction.name in STORES or any("[" in operand for operand in operands)
    if instruction.name not in WITHOUT_RESULT and operands:
        first = operands.pop(0)
        wide = width if memory else max(width, 2 if ".WIDE" in instruction.opcode or instruction.name == "CS2R" else 1)
        written |= registers_in(first, wide)
        if re.match(r"!?U?P", first) and operands and (instruction.name in ONE_PREDICATE or re.match(r"!?U?P", operands[0])):
            written |= registers_in(operands.pop(0), width)
    for i, operand in enumerate(operands):
        if "[" in operand:
            read |= registers_in(operand)
        elif memory:
            read |= registers_in(operand, width)
        else:
            read |= registers_in(operand, 2 if ".WIDE" in instruction.opcode and i == 2 else 1)
    if "PR" in operands:
        read |= {f"P{i}" for i in range(7)}
    return written, read


# ---- following ----


@dataclass(frozen=True)
class Pending:
    """A load in flight."""

    load: int  # its index
    scoreboard: int
    role: str  # see follow
    trip: int  # one more than were waited for before it was issued


@dataclass
class State:
    """Possible facts before an instruction, over all ways that lead there."""

    pending: frozenset[Pending] = frozenset()
    holds: dict[str, frozenset[int]] = field(default_factory=dict)  # register -> loads that have written it, or will
    joins: dict[str, frozenset[str]] = field(default_factory=dict)  # barrier register -> where BSYNC goes on
    trips: dict[str, int] = field(default_factory=dict)  # role -> loads that were waited for one after the other

    def copy(self) -> State:
        return State(self.pending, dict(self.holds), dict(self.joins), dict(self.trips))

    def merge(self, other: State) -> bool:
        """Adds the other's facts. True if any is new."""
        before = self.copy()
        self.pending |= other.pending
        for register, loads in other.holds.items():
            self.holds[register] = self.holds.get(register, frozenset()) | loads
        for barrier, labels in other.joins.items():
            self.joins[barrier] = self.joins.get(barrier, frozenset()) | labels
        for role, trips in other.trips.items():
            self.trips[role] = max(self.trips.get(role, 0), trips)
        return before != self

    def trips_before(self, role: str) -> int:
        """Returns the loads that the same warp may have waited for: in this part, or in what all warps do."""
        return max(self.trips.get(role, 0), self.trips.get("", 0))


MOST_TRIPS = 9
"""Loops would go on for ever."""


@dataclass(frozen=True)
class Wait:
    load: Instruction
    at: Instruction
    why: str
    by_register: bool  # else it shares a scoreboard with something that is waited for


@dataclass
class Followed:
    """From the entry of a kernel to its first barriers."""

    loads: list[Instruction] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    trips: dict[str, int] = field(default_factory=dict)  # role -> the most loads that were waited for one after the other
    barriers: list[Instruction] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # instructions that could not be followed


def next_of(function: Function, index: int, state: State) -> list[int] | str:
    """Returns the instructions that may come after this one, or why they are unknown."""
    this = function.instructions[index]
    conditional = this.guard not in ("", "@PT ")
    after: list[int | None] = []
    if this.name == "EXIT":
        after = [index + 1] if conditional else []
    elif this.name == "BRA":
        after = [function.labels.get(this.label or "")]
        if conditional or len(this.operands) > 1 or ".DIV" in this.opcode or ".CONV" in this.opcode:
            after.append(index + 1)
    elif this.name == "BSYNC":
        targets = state.joins.get(this.operands[0], frozenset())
        if not targets:
            return f"{this} joins what no BSSY began"
        after = [function.labels.get(label) for label in targets]
    elif this.name == "WARPSYNC" and this.label:
        after = [function.labels.get(this.label), index + 1]
    elif this.name in {"CALL", "RET", "BRX", "BRXU", "JMP", "JMX", "JMXU", "KILL", "BPT", "RTT", "LEPC"}:
        return f"{this} leads elsewhere"
    else:
        after = [index + 1]
    known = [i for i in after if i is not None and i < len(function.instructions)]
    return known if len(known) == len(after) else f"{this} leads nowhere"


def follow(function: Function, role_of: Callable[[Instruction], str] = lambda load: "") -> Followed:
    """`role_of` names the part of the kernel that a load is of, if its warps have no other: what they wait for delays no others."""
    result = Followed()
    waits: dict[tuple[int, int], Wait] = {}
    loads: set[int] = set()
    barriers: set[int] = set()
    lost: dict[int, str] = {}
    states = {0: State()}
    todo = [0]
    while todo:
        index = todo.pop()
        this, state = function.instructions[index], states[index].copy()
        written, read = split(this)
        waited = {p for p in state.pending if p.scoreboard in this.waits_for}
        for p in waited:
            touched = sorted(r for r in read | written if p.load in state.holds.get(r, ()))
            how = "reads" if set(touched) & read else "overwrites"
            why = f"{how} {' and '.join(touched)}" if touched else f"waits for scoreboard {p.scoreboard}"
            waits[p.load, index] = Wait(function.instructions[p.load], this, why, bool(touched))
            state.trips[p.role] = max(state.trips.get(p.role, 0), p.trip)
            result.trips[p.role] = max(result.trips.get(p.role, 0), p.trip)
        state.pending -= waited
        on_the_way = {p.load for p in state.pending}
        for register in read:
            for load in state.holds.get(register, frozenset()) & on_the_way:
                early = function.instructions[load]
                waits[load, index] = Wait(early, this, f"reads {register}", True)
                lost[index] = f"{this} reads {register} and does not wait for {early}: scoreboards are not read as they are meant"
        if this.name == "BAR":
            barriers.add(index)
            continue
        if is_load(this) and this.writes_scoreboard is None:
            lost[index] = f"{this} has no scoreboard"
        elif is_load(this):
            loads.add(index)
            role = role_of(this)
            trip = min(MOST_TRIPS, state.trips_before(role) + 1)
            state.pending |= {Pending(index, this.writes_scoreboard or 0, role, trip)}
        for register in written:
            kept = state.holds.get(register, frozenset()) if this.guard else frozenset()
            state.holds[register] = kept | ({index} if is_load(this) else set())
        if this.name == "BSSY" and this.label:
            state.joins[this.operands[0]] = frozenset({this.label})
        after = next_of(function, index, state)
        if isinstance(after, str):
            lost[index] = after
            continue
        for i in after:
            if i not in states:
                states[i] = state.copy()
                todo.append(i)
            elif states[i].merge(state):
                todo.append(i)
    result.loads = [function.instructions[i] for i in sorted(loads)]
    result.waits = [waits[key] for key in sorted(waits)]
    result.barriers = [function.instructions[i] for i in sorted(barriers)]
    result.lost = [lost[i] for i in sorted(lost)]
    return result
