import subprocess,sys,numpy as np
# cmp.py half count budgets jointbudgets variants...
half,count,bud,jb=sys.argv[1],int(sys.argv[2]),sys.argv[3],sys.argv[4]
S='/tmp/h/hits2/sim'
step=200//count//1
allf=[f'a{n}.bin' for n in range(half=='odd',200,2)]
files=allf[::max(1,100//count)][:count]
def run(v,b):
    o=subprocess.run([S,*files,*v.split(),'b='+b],capture_output=True,text=True,cwd='/tmp/h/hits').stdout
    return np.array([[float(x) for x in l.split()[1:]] for l in o.splitlines()])
import os,pickle
def cached(v,b):
    p=f'/tmp/h/hits2/cache_{half}{count}_{v}_{b}.pkl'.replace(' ','_')
    if not os.path.exists(p): pickle.dump(run(v,b),open(p,'wb'))
    return pickle.load(open(p,'rb'))
def rep(g,R,refs):
    def d(r):
        x=(g-r).ravel(); return f'{x.mean():+.1f} min {x.min():+.1f} <-2 {100*(x<-2).mean():.0f}%'
    wv=np.argsort((g-R[1]).min(1))[:3]
    w=np.argsort((g-R[0]).min(1))[:4]
    return 'mean '+' '.join(f'{x:.1f}' for x in g.mean(0))+' '+' | '.join(f'{n} {d(r)}' for n,r in zip(refs,R))+' worst '+' '.join(files[i]+str(list(map(float,(g-R[0])[i].round(1)))) for i in w)+' wv '+' '.join(files[i]+str(list(map(float,(g-R[1])[i].round(1)))) for i in wv)
for v in sys.argv[5:]:
    if bud!='-':
        R=[cached(f'pol={r}',bud) for r in ('tail','vllm')]
        print('SPLIT',v,rep(run(v,bud),R,('lru','vllm')),flush=True)
    if jb!='-':
        R=[cached(f'pol={r}',jb) for r in ('tailj','vllm')]
        print('JOINT',v,rep(run(v+' joint=1',jb),R,('lru','vllm')),flush=True)
