"""Where a CUDA step's time goes, stage by stage.

make build CMAKE_ARGS=-DPPLX_CUDA_STAGES=ON
mpirun -n 4 --bind-to none python bench/stages.py --tokens 1,128 --wire fp8
"""

from pplx_comm.bench.main import leave
from pplx_comm.bench.stages import main

if __name__ == "__main__":
    leave(main())
