import subprocess,sys,numpy as np
# cmp.py even|odd count budgets "variant" "variant"... ; first variant(s) prefixed by = are references
half,count,bud=sys.argv[1],int(sys.argv[2]),sys.argv[3]
files=[f'a{n}.bin' for n in range(half=='odd',2*count,2)]
def run(v):
    o=subprocess.run(['./sim',*files,*v.split(),'b='+bud],capture_output=True,text=True).stdout
    return np.array([[float(x) for x in l.split()[1:]] for l in o.splitlines()])
refs=['pol=tail','pol=vllm','pol=tailj']
R=[run(v) for v in refs]
lru=np.maximum(R[0],-1)
print('mean',*[f'{v}: '+' '.join(f'{x:.1f}' for x in r.mean(0)) for v,r in zip(refs,R)],sep='\n  ')
for v in sys.argv[4:]:
    g=run(v); 
    def d(r): 
        x=(g-r).ravel(); return f'mean {x.mean():+.1f} p5 {np.percentile(x,5):+.1f} min {x.min():+.1f} <-2: {100*(x<-2).mean():.0f}%'
    w=np.argsort((g-R[0]).min(1))[:4]
    print(f'{v:28} mean '+' '.join(f'{x:.1f}' for x in g.mean(0))+' | vs lru '+d(R[0])+' | vs vllm '+d(R[1])+' | vs lrujoint '+d(R[2])+' worst '+str([(files[i],*(g-R[0])[i].round(1)) for i in w]),flush=True)
