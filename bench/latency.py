"""Latency of dispatch and combine beside the floor and the peers, under mpirun or torchrun.

mpirun -n 4 python bench/latency.py --tokens 1,8,32,128 --wire fp8 --transport mapped,proxy:shm,proxy:tcp
"""

from pplx_comm.bench.main import leave, main

if __name__ == "__main__":
    leave(main())
