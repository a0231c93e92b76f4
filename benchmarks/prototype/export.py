import sys, struct, gzip
sys.path.insert(0,'/work/wt/hits/benchmarks')
import numpy as np
from pathlib import Path
from simulators.parts import prefixes, BLOCK
from simulators.agents import setting, Traffic, REQUESTS
from trace_tokens import requests, Request
def export(reqs, path):
    hs=[prefixes(np.concatenate([r.prompt,r.answer]))[BLOCK-1::BLOCK] for r in reqs]
    flat=np.concatenate(hs); u,inv=np.unique(flat,return_inverse=True)
    inv=(inv+1).astype(np.int32)
    with open(path,'wb') as f:
        f.write(struct.pack('<ii',len(reqs),len(u)))
        o=0
        for r,h in zip(reqs,hs):
            f.write(struct.pack('<iiiif',len(r.prompt),len(r.answer),r.ceiling,len(h),r.arrival))
            f.write(inv[o:o+len(h)].tobytes()); o+=len(h)
def conv(): return list(requests(Path('/work/shared/traces/mooncake_conversation.jsonl')))
if __name__=='__main__':
    what=sys.argv[1]
    if what=='conv': export(conv(),'conv.bin')
    elif what=='mix':
        n=int(sys.argv[2]); c=conv(); a=Traffic(setting(n)).run(4000)
        scale=3600/a[-1].arrival; 
        off=(1<<30)-(1<<28)-2
        for r in a:
            r.prompt=r.prompt+np.int32(off-0); r.answer=r.answer+np.int32(off); r.arrival*=scale
        assert max(int(r.prompt.max()) for r in a)<(1<<30)
        export(sorted(c+a,key=lambda r:r.arrival),f'mix{n}.bin')
    else:
        for n in range(int(sys.argv[2]),int(sys.argv[3]),int(sys.argv[4])): export(Traffic(setting(n)).run(REQUESTS),f'a{n}.bin')
