"""One launch each of the kernels of MQA logits, for a profiler:  ncu --clock-control none ... mqa_profile.py prefill|decode."""

import sys

import mqa_sweep as sweep

from nvfp4_kernels.triton import mqa_hopper_direct

results = []
if sys.argv[1] == "prefill":
    sweep.run_dense("gluon s4 fadd", "2048x8192", results, True)
else:
    tile = mqa_hopper_direct.Tile(4, 2, True, False, None, 132 * 32)
    sweep.run_decode(sys.argv[1] == "paged", tile, results, True)
