"""tools/machine_code.py finds what it is there for: in small pieces of machine code, and in a kernel that nvcc compiles."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import machine_code
import pytest
import sass
from machine_code import Kernel, MayWait, Sizes

ROOT = Path(__file__).resolve().parents[2]

LOAD = "LDG.E R4, desc[UR4][R2.64]"
BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x0"
NONE = 7  # no scoreboard


class Row(NamedTuple):
    """An instruction, its scoreboard, those that it waits for, and its line in source.cu."""

    text: str
    writes: int = NONE
    waits: tuple[int, ...] = ()
    line: int = 1


def function(*rows: Row | str, file: str = "source.cu") -> sass.Function:
    """As nvdisasm prints it. A string that ends with a colon is a label, any other one an instruction that waits for nothing."""
    text, address = ['\t.section\t.text.kernel,"ax",@progbits', ".text.kernel:"], 0
    for row in rows:
        if isinstance(row, str) and row.endswith(":"):
            text.append(row)
            continue
        row = Row(row) if isinstance(row, str) else row
        control = row.writes << 5 | 7 << 8 | sum(1 << number for number in row.waits) << 11
        text.append(f'\t//## File "/include/helper.h", line 7 inlined at "{file}", line {row.line}')
        text.append(f'\t//## File "{file}", line {row.line}')
        text.append(f"        /*{address:04x}*/                   {row.text} ;          /* 0x0000000402047981 */")
        text.append(f"                                                              /* 0x{control << 41:016x} */")
        address += 16
    (found,) = sass.read(text)
    return found


def waits(followed: sass.Followed) -> list[tuple[int, int, str]]:
    assert not followed.lost, followed.lost
    return [(wait.load.address // 16, wait.at.address // 16, wait.why) for wait in followed.waits]


# ---- what is read ----


def test_an_instruction() -> None:
    (this,) = function(Row("@!P2 LDG.E.64 R50, desc[UR10][R12.64+0x4]", 5, (0, 5))).instructions
    assert (this.address, this.guard, this.opcode, this.name) == (0, "@!P2 ", "LDG.E.64", "LDG")
    assert this.operands == ["R50", "desc[UR10][R12.64+0x4]"]
    assert (this.writes_scoreboard, this.waits_for) == (5, {0, 5})
    assert this.lines == (("/include/helper.h", 7), ("source.cu", 1))
    assert sass.split(this) == ({"R50", "R51"}, {"P2", "UR10", "R12", "R13"})


@pytest.mark.parametrize(
    ("text", "written", "read"),
    [
        ("LDG.E.128.STRONG.SYS R4, desc[UR4][R2.64]", "R4 R5 R6 R7", "UR4 R2 R3"),
        ("STG.E.64 desc[UR4][R2.64], R8", "", "UR4 R2 R3 R8 R9"),
        ("ATOMG.E.EXCH.STRONG.GPU PT, R5, desc[UR4][R2.64], R7", "R5", "UR4 R2 R3 R7"),
        ("ATOMG.E.CAS.64.STRONG.GPU P1, R4, desc[UR4][R2.64], R8", "P1 R4 R5", "UR4 R2 R3 R8 R9"),
        ("ISETP.NE.AND P0, PT, R4, RZ, P3", "P0", "R4 P3"),
        ("LOP3.LUT P0, RZ, R4, 0x7f, RZ, 0xc0, !PT", "P0", "R4"),
        ("IADD3 R8, P1, R4.reuse, R6, RZ", "R8", "P1 R4 R6"),  # P1 is written; as it has no load, that it counts as read does no harm
        ("IMAD.WIDE.U32 R8, R4, 0x8, R6", "R8 R9", "R4 R6 R7"),
        ("@P1 SEL R8, R4, R5, P0", "R8", "P1 R4 R5 P0"),
        ("SHFL.IDX PT, R8, R4, R5, 0x1f", "R8", "R4 R5"),
        ("R2UR UR6, R4", "UR6", "R4"),
        ("BRA.DIV UR4, `(.L_x_1)", "", "UR4"),
        ("CS2R R2, SR_GLOBALTIMERLO", "R2 R3", ""),
    ],
)  # fmt: skip
def test_registers(text: str, written: str, read: str) -> None:
    assert sass.split(function(text).instructions[0]) == (set(written.split()), set(read.split()))


# ---- what is found ----


def test_an_unused_load() -> None:
    followed = sass.follow(function(Row(LOAD, 0), "IADD3 R5, R2, 0x1, RZ", BARRIER, Row("STS [R0], R4", waits=(0,))))
    assert waits(followed) == [] and not followed.trips
    assert len(followed.loads) == len(followed.barriers) == 1


def test_a_used_load() -> None:
    followed = sass.follow(function(Row(LOAD, 0), Row("ISETP.NE.AND P0, PT, R4, RZ, PT", waits=(0,)), BARRIER))
    assert waits(followed) == [(0, 1, "reads R4")] and followed.trips == {"": 1}


def test_a_barrier_that_waits() -> None:
    assert waits(sass.follow(function(Row(LOAD, 0), Row("BAR.RED.OR.DEFER_BLOCKING 0x0, P0", waits=(0,))))) == [
        (0, 1, "waits for scoreboard 0")
    ]


@pytest.mark.parametrize("register", ["R4", "R5", "R6", "R7"])
def test_every_register_of_a_wide_load(register: str) -> None:
    load = Row("LDG.E.128 R4, desc[UR4][R2.64]", 2)
    assert waits(sass.follow(function(load, Row(f"STS [R0], {register}", waits=(2,)), BARRIER))) == [(0, 1, f"reads {register}")]
    followed = sass.follow(function(load, f"STS [R0], {register}", BARRIER))
    assert len(followed.lost) == 1 and f"reads {register} and does not wait" in followed.lost[0]


def test_a_predicate() -> None:
    """One that an atomic operation writes, read by a guard."""
    claim = Row("ATOMG.E.CAS.STRONG.GPU P1, R4, desc[UR4][R2.64], R8", 3)
    assert waits(sass.follow(function(claim, Row("@P1 BRA `(.L_x_1)", waits=(3,)), ".L_x_1:", BARRIER))) == [(0, 1, "reads P1")]
    assert "reads P1 and does not wait" in sass.follow(function(claim, "@P1 BRA `(.L_x_1)", ".L_x_1:", BARRIER)).lost[0]


def test_a_register_that_is_overwritten() -> None:
    """No data flows there; hardware waits all the same."""
    assert waits(sass.follow(function(Row(LOAD, 0), Row("MOV R4, 0x1", waits=(0,)), BARRIER))) == [(0, 1, "overwrites R4")]


def test_a_register_that_is_overwritten_perhaps() -> None:
    """It still has what was loaded first, where the guard is false."""
    again, use = Row("@P0 LDG.E R4, desc[UR4][R2.64]", 1), Row("STS [R0], R4", waits=(1,))
    (lost,) = sass.follow(function(Row(LOAD, 0), again, use, BARRIER)).lost
    assert "does not wait for 0x0000 LDG" in lost
    assert waits(sass.follow(function(Row(LOAD, 0), again._replace(text=LOAD), use, BARRIER))) == [(1, 2, "reads R4")]


def test_a_shared_scoreboard() -> None:
    other = Row("LDG.E R8, desc[UR4][R2.64]", 0)
    followed = sass.follow(function(Row(LOAD, 0), other, Row("STS [R0], R8", waits=(0,)), BARRIER))
    assert waits(followed) == [(0, 2, "waits for scoreboard 0"), (1, 2, "reads R8")]
    own = sass.follow(function(Row(LOAD, 0), other._replace(writes=1), Row("STS [R0], R8", waits=(1,)), BARRIER))
    assert waits(own) == [(1, 2, "reads R8")]


def test_a_depbar() -> None:
    assert waits(sass.follow(function(Row(LOAD, 4), "DEPBAR.LE SB4, 0x1", BARRIER))) == [(0, 1, "waits for scoreboard 4")]


# ---- what is followed ----


def test_both_sides_of_a_branch() -> None:
    use = Row("STS [R0], R4", waits=(0,))
    for sides in ((use, "NOP"), ("NOP", use)):
        code = function(Row(LOAD, 0), "@P0 BRA `(.L_x_1)", sides[0], "BRA `(.L_x_2)", ".L_x_1:", sides[1], ".L_x_2:", BARRIER)
        assert [why for _, _, why in waits(sass.follow(code))] == ["reads R4"]
    skipped = function(Row(LOAD, 0), "BRA `(.L_x_1)", use, ".L_x_1:", BARRIER)
    assert waits(sass.follow(skipped)) == []


def test_where_threads_join() -> None:
    """BSYNC goes on where its BSSY says, not behind itself."""
    code = function(
        "BSSY B0, `(.L_x_1)", Row(LOAD, 0), "BSYNC B0", Row("STS [R0], R4", waits=(0,)), "EXIT", ".L_x_1:", BARRIER
    )  # fmt: skip
    assert waits(sass.follow(code)) == []
    assert "joins what no BSSY began" in sass.follow(function("BSYNC B0", BARRIER)).lost[0]


def test_a_loop() -> None:
    """The load of a turn is waited for in the next one."""
    code = function(".L_x_1:", Row("IADD3 R5, R4, R5, RZ", waits=(0,)), Row(LOAD, 0), "@P0 BRA `(.L_x_1)", BARRIER)
    followed = sass.follow(code)
    assert waits(followed) == [(1, 0, "reads R4")] and followed.trips[""] == sass.MOST_TRIPS


@pytest.mark.parametrize(
    "text", ["CALL.REL.NOINC `(function)", "BRX R4 -0x10", "JMX R4", "RET.REL.NODEC R4 `(kernel)", "BRA `(nowhere)"]
)
def test_code_that_cannot_be_followed(text: str) -> None:
    (lost,) = sass.follow(function(Row(LOAD, 0), text, BARRIER)).lost
    assert "leads" in lost and text in lost


def test_a_load_without_a_scoreboard() -> None:
    assert "has no scoreboard" in sass.follow(function(LOAD, BARRIER)).lost[0]


def test_trips() -> None:
    first, second = Row(LOAD, 0), Row("LDG.E R8, desc[UR4][R2.64]", 1)
    uses = [Row("STS [R0], R4", waits=(0,)), Row("STS [R0], R8", waits=(1,))]
    assert sass.follow(function(first, second, *uses, BARRIER)).trips == {"": 1}
    after = function(first, uses[0], second, uses[1], BARRIER)
    assert sass.follow(after).trips == {"": 2}
    assert sass.follow(after, lambda load: str(load.address)).trips == {"0": 1, "32": 1}


# ---- the rules ----

SIZES = Sizes(64, 96, 8, 4, 4)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(machine_code, "ROOT", tmp_path)
    path = tmp_path / "src" / "kernel.cu"
    path.parent.mkdir()
    path.write_text("ids = load(a);\nstep = read_step(a);\n")
    return str(path)


def kernel(*rows: Row | str, file: str = "source.cu", name: str = "kernel<AsIs, true>") -> Kernel:
    return Kernel(name, function(*rows, file=file), SIZES)


def test_a_wait_is_reported_with_its_line(source: str) -> None:
    bad = kernel(Row(LOAD, 0, line=1), Row("STS [R0], R4", waits=(0,), line=2), BARRIER, file=source)
    (said,) = machine_code.check([bad], {bad.name: SIZES}, {})
    assert "kernel<AsIs, true>: 0x0010 STS [R0], R4" in said and "kernel.cu:1  ids = load(a);" in said
    assert "kernel.cu:2  step = read_step(a);" in said and "reads R4 of 0x0000 LDG" in said
    general = replace(bad, name="kernel<AsIs, false>")
    assert machine_code.check([general], {general.name: SIZES}, {}) == []


def test_an_exception(source: str) -> None:
    bad = kernel(Row(LOAD, 0, line=2), Row("STS [R0], R4", waits=(0,), line=2), BARRIER, file=source)
    step, other = MayWait("kernel.cu", "read_step(", "a reason"), MayWait("kernel.cu", "load(a)", "another one")
    assert machine_code.check([bad], {bad.name: SIZES}, {"kernel": (step,)}) == []
    assert machine_code.check([bad], {bad.name: SIZES}, {bad.name: (step,)}) == []
    (said,) = machine_code.check([bad], {bad.name: SIZES}, {"kernel": (step, other)})
    assert "nothing waits any more for `load(a)`" in said


def test_an_exception_is_for_one_trip(source: str) -> None:
    twice = (Row(LOAD, 0, line=2), Row("STS [R0], R4", waits=(0,), line=2)) * 2
    bad = kernel(*twice, BARRIER, file=source)
    step = MayWait("kernel.cu", "read_step(", "a reason")
    (said,) = machine_code.check([bad], {bad.name: SIZES}, {"kernel": (step,)})
    assert "2 round trips of memory one after the other, 1 at most" in said


def test_a_load_that_may_be_waited_for_along_with_another(source: str) -> None:
    early, step = Row("LDG.E R8, desc[UR4][R2.64]", 0, line=1), Row(LOAD, 0, line=2)
    rules = {
        "kernel": (
            MayWait("kernel.cu", "ids = load(a)", "a reason", along=True),
            MayWait("kernel.cu", "step = ", "another one"),
        )
    }
    good = kernel(early, step, Row("STS [R0], R4", waits=(0,), line=2), BARRIER, file=source)
    assert machine_code.check([good], {good.name: SIZES}, rules) == []
    used = kernel(early, step, Row("IADD3 R9, R8, R4, RZ", waits=(0,)), BARRIER, file=source)
    assert "reads R8" in machine_code.check([used], {used.name: SIZES}, rules)[0]
    alone = kernel(early, Row("STS [R0], R9", waits=(0,)), step, BARRIER, file=source)
    assert "waits for scoreboard 0" in machine_code.check([alone], {alone.name: SIZES}, rules)[0]


def test_loads_of_a_look(tmp_path: Path) -> None:
    path = tmp_path / "arrival.cuh"
    path.write_text("if (look(true)) return;\nelse\n  look(false);\n")
    first, second = Row(LOAD, 0), Row("LDG.E R8, desc[UR4][R2.64+0x10]", 1)
    use = Row("ISETP.EQ.AND P0, PT, R4, -0x1, PT", waits=(0,))
    assert machine_code.check_looks(function(first, second, use, file=str(path))) == []
    (said,) = machine_code.check_looks(function(first, use, second, file=str(path)))
    assert "0x0020 LDG.E R8" in said and "comes after `0x0010 ISETP" in said
    other = second._replace(line=3)
    assert machine_code.check_looks(function(first, use, other, file=str(path))) == []
    assert machine_code.check_looks(function(first, use, "later:", second, file=str(path))) == []
    assert machine_code.check_looks(function(first, "BRA `(later)", use, "later:", second, file=str(path))) == []


def test_sizes() -> None:
    good = kernel(Row(LOAD, 0), BARRIER)
    assert machine_code.check([good], {good.name: SIZES}, {}) == []
    for name in ("code", "registers", "stack", "spill_stores", "spill_loads"):
        bounds = replace(SIZES, **{name: getattr(SIZES, name) - 1})
        (said,) = machine_code.check([good], {good.name: bounds}, {})
        assert said == f"{good.name}: {name.replace('_', ' ')}: {getattr(SIZES, name)}, at most {getattr(SIZES, name) - 1}"


def test_each_kernel_has_its_bounds() -> None:
    one = kernel(Row(LOAD, 0), BARRIER)
    assert machine_code.check([one], {}, {}) == [f"{one.name}: BOUNDS does not have it"]
    said = machine_code.check([one], {one.name: SIZES, "another": SIZES}, {})
    assert said == ["another: BOUNDS has it, but there is no such kernel"]


def test_a_kernel_without_loads_is_not_what_the_rule_is_for() -> None:
    empty = kernel("EXIT")
    assert "is this still the kernel" in machine_code.check([empty], {empty.name: SIZES}, {})[0]


def test_names() -> None:
    kernel = "pplx::cuda::decode::(anonymous namespace)::dispatch<pplx::cuda::Quantised<2u>, true, false>"
    demangled = f"void {kernel}(pplx::cuda::DispatchArguments)"
    assert machine_code.readable(demangled) == "decode::dispatch<Quantised<2>, true, false>"


def test_options_are_those_of_cmake() -> None:
    """CMake's own text, without what it says to the host compiler."""
    assert {"-std=c++17", "--fmad=false", "--expt-relaxed-constexpr", "-O3"} <= set(machine_code.options())
    text = (ROOT / "cmake" / "cuda.cmake").read_text()
    assert set(re.findall(r"COMPILE_LANGUAGE:CUDA>:(.+)>\)?$", text, re.M)) <= set(machine_code.options())


# ---- all of it ----


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["machine_code.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        machine_code.main()
    said = capsys.readouterr().out
    assert all(option in said for option in ("--show", "--bounds", "--loads")) and "No GPU is needed" in said


KERNEL = """
__global__ void {name}(const int* a, const int* b, int* c) {{
  __shared__ int words[64];
  int first = a[threadIdx.x];
  {between}
  int second = b[threadIdx.x];
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  c[threadIdx.x] = first + second + words[threadIdx.x ^ 1];
}}
"""


@pytest.mark.slow
def test_code_that_nvcc_compiles(tmp_path: Path) -> None:
    """The compiler of the check itself: `make check` has installed it by now."""
    tools = machine_code.compiler()
    path, cubin = tmp_path / "tiny.cu", tmp_path / "tiny.cubin"
    path.write_text(
        KERNEL.format(name="overlaps", between="") + KERNEL.format(name="waits", between="if (first < 0) return;  // at once")
    )
    said = machine_code.run([str(tools / "nvcc"), *machine_code.options(), "-cubin", "-o", str(cubin), str(path)])
    kernels = {kernel.name: kernel for kernel in machine_code.kernels_of(machine_code.disassembled(cubin, tools), said)}
    assert sorted(kernels) == ["overlaps", "waits"]
    followed = {name: sass.follow(kernel.function) for name, kernel in kernels.items()}
    assert [len(f.loads) for f in followed.values()] == [2, 2] and not [f.lost for f in followed.values() if f.lost]
    assert followed["overlaps"].waits == []
    (wait,) = followed["waits"].waits
    line = path.read_text().splitlines().index("  if (first < 0) return;  // at once") + 1
    assert wait.why.startswith("reads R") and any(os.path.samefile(file, path) and n == line for file, n in wait.at.lines)


def test_traps() -> None:
    assert machine_code.check_traps(function(LOAD, BARRIER, "EXIT")) == []
    (wrong,) = machine_code.check_traps(function(LOAD, BARRIER, Row("BPT.TRAP 0x1", line=9)))
    assert "BPT.TRAP" in wrong and wrong.endswith("a trap")
