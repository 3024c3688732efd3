"""One launch of one kernel, for a profiler: ncu --clock-control none ... mqa_profile.py prefill|decode|paged."""

import sys

import mqa_sweep as sweep

from nvfp4_kernels.triton import mqa_hopper_direct

results = []
if sys.argv[1] == "prefill":
    sweep.run_dense("gluon s4 fadd", "2048x8192", results, True)
else:
    tile = mqa_hopper_direct.Tile()
    sweep.run_decode(sys.argv[1] == "paged", tile, results, True)
