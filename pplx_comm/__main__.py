from pplx_comm.cli import main

raise SystemExit(main())
