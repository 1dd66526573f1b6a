"""What the proxy costs on the host: mailbox words to posts, over a fabric that costs nothing.

python bench/proxy.py
python bench/proxy.py --peers 8,64 --endpoints 2 --json proxy.json
"""

from pplx_comm.bench.proxy import main

if __name__ == "__main__":
    main()
