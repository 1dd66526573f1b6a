"""What it costs to hand over between a GPU and the proxy, over a network that costs nothing.

python bench/handover.py
python bench/handover.py --peers 8,63 --json handover.json
"""

from pplx_comm.bench.handover import main

if __name__ == "__main__":
    main()
