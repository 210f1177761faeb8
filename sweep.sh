cd /tmp/b2; source /work/main/.venv/bin/activate; export PYTHONPATH=/work/wt-break2:/work/wt-break2/tests:/tmp/b2
for env in Sudoku Instant; do for deed in "$@"; do
 o=$(ROGUE=$deed timeout 40 nice python play2.py $env ${T:-3} 2>&1); c=$?
 echo "=== $env $deed -> $c bytes ${#o}"; echo "${o:0:300}" | head -4;  [ ${#o} -gt 300 ] && echo "... ${o: -200}"
done; done
