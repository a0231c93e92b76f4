"""Check the test of machine code on excerpts of machine code."""

from __future__ import annotations

import pytest

from sass import unwritten_reads

PRODUCT = "HGMMA.64x32x16.F32 R24, R40, gdesc[UR8].tnspB, R24"
SHARED_PRODUCT = "HGMMA.64x32x16.F32 R24, gdesc[UR8], R24"
FAULT = "UIADD3 UR22, UP0, UR28, 0x40, URZ"
# The first launch of fp32 KDA in tiles of 32 channels, as ptxas 12.8 assembles it.
AS_FOUND = f"""
S2UR UR4, SR_CgaCtaId
UMOV UR13, 0x400
ULEA UR13, UR4, UR13, 0x18
UIADD3 UR4, UR13, 0x4000, URZ
USHF.R.U32.HI UR4, URZ, 0x4, UR4
USGXT.U32 UR4, UR4, 0xe
UMOV UR30, UR4
{FAULT}
UIADD3.X UR23, UR28, -0x7fffffe0, URZ, UP0, !UPT
UMOV UR31, 0x80000020
HGMMA.64x32x16.F32 R24, R40, gdesc[UR28].tnspB, R24
UMOV UR28, UR30
EXIT
"""


def code(text: str) -> str:
    """Return the text as nvdisasm prints it."""
    lines = text.strip().splitlines()
    return "\n".join(x if x.endswith(":") else f"        /*{16 * i:04x}*/   {x} ;" for i, x in enumerate(lines))


def test_the_fault_that_was_found() -> None:
    assert unwritten_reads(code(AS_FOUND)) == [FAULT, "UIADD3.X UR23, UR28, -0x7fffffe0, URZ, UP0, !UPT"]
    assert not unwritten_reads(code(AS_FOUND.replace(FAULT, f"UMOV UR28, UR4\n{FAULT}")))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("UMOV UR10, URZ\nUMOV UR11, URZ\n" + PRODUCT, 0),
        ("UMOV UR10, URZ\n" + PRODUCT, 1),
        ("UMOV UR10, URZ\nUMOV UR11, URZ\n" + SHARED_PRODUCT, 1),
        ("ULDC.64 UR8, c[0x0][0x210]\nUIADD3.64 UR10, UR8, 0x2, URZ\n" + SHARED_PRODUCT, 0),
        ("LDG.E R2, desc[UR4][R2.64]", 1),
        ("ULDC.64 UR4, c[0x0][0x208]\nLDG.E R2, desc[UR4][R2.64]", 0),
        ("LDS R2, [R3+UR4+0x100]", 1),
        ("UISETP.GE.U32.AND UP0, UPT, UR13, 0x1, UPT", 1),
    ],
)
def test_which_registers_an_instruction_takes(text: str, faults: int) -> None:
    assert len(unwritten_reads(code(text))) == faults


def test_every_path_counts() -> None:
    skipped = "@P0 BRA `(.L_x_1)\nUMOV UR4, 0x1\n.L_x_1:\nIADD3 R0, R0, UR4, RZ\nEXIT"
    assert unwritten_reads(code(skipped)) == ["IADD3 R0, R0, UR4, RZ"]
    assert not unwritten_reads(code("UMOV UR4, URZ\n" + skipped))
    loop = (
        "BRA `(.L_x_2)\n.L_x_1:\nIADD3 R0, R0, UR4, RZ\n@P0 BRA `(.L_x_2)\nEXIT\n.L_x_2:\nUMOV UR4, 0x1\nBRA `(.L_x_1)"
    )
    assert not unwritten_reads(code(loop))
