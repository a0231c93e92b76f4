# report: second half, odd settings (200), mixture second half
echo "policy | conv 2nd half | mix9 2nd half | agents odd"
for o in "pol=git" "pol=git samp=32" "pol=git joint=1 samp=32" "pol=lru" "pol=gdsf" "pol=lfu" "pol=cur coupled=0" "pol=tail" "pol=tailj" "pol=vllm"; do
echo "$o | $(./sim conv.bin start=1800 b=5+20,20+40,40+80 $o | cut -d' ' -f2-) | $(./sim mix9.bin start=1800 b=5+20,20+40,40+80 $o | cut -d' ' -f2-) | $(python3 cmp.py odd 100 2+4,5+20,20+40 "$o" | tail -1)"; done
