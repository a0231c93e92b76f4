// prototype simulator of retention policies
#include <bits/stdc++.h>
using namespace std;
typedef long long ll; typedef double D;
struct Req{int P,A,ceil_,n;float t;const int*ids;};
struct Trace{vector<int> buf;vector<Req> r;int nid;};
static const int B=64;
static D SB=77266944, KB=24576;
Trace load(const char*p){FILE*f=fopen(p,"rb");if(!f){perror(p);exit(1);}int h[2];fread(h,4,2,f);Trace T;T.nid=h[1]+1;vector<array<int,4>> m;vector<float> ts;vector<size_t> off;
 for(int i=0;i<h[0];i++){int q[4];float t;fread(q,4,4,f);fread(&t,4,1,f);off.push_back(T.buf.size());T.buf.resize(T.buf.size()+q[3]);fread(&T.buf[off.back()],4,q[3],f);m.push_back({q[0],q[1],q[2],q[3]});ts.push_back(t);}
 fclose(f);for(int i=0;i<h[0];i++)T.r.push_back({m[i][0],m[i][1],m[i][2],m[i][3],ts[i],&T.buf[off[i]]});return T;}
map<string,string> opt; D O(const string&k,D d){auto i=opt.find(k);return i==opt.end()?d:atof(i->second.c_str());} string OS(const string&k,string d){auto i=opt.find(k);return i==opt.end()?d:i->second;}
// ---------- generic lru over keys
struct Lru{D cap,used=0;list<ll> l;unordered_map<ll,pair<list<ll>::iterator,D>> m;
 bool has(ll k){return m.count(k);} void use(ll k,D s){auto i=m.find(k);if(i!=m.end())l.splice(l.end(),l,i->second.first);else{l.push_back(k);m[k]={prev(l.end()),s};used+=s;}}
 void drop(ll k){auto i=m.find(k);if(i!=m.end()){used-=i->second.second;l.erase(i->second.first);m.erase(i);}}
 void fit(){while(used>cap){ll k=l.front();drop(k);}}};
vector<int> tailLru(const Trace&T,D S,D K,bool joint){Lru a,b;a.cap=joint?S+K:S;b.cap=K;Lru&pg=joint?a:b;vector<char> seen(T.nid),ends(T.nid);vector<int> out;D PB=B*KB;
 for(auto&r:T.r){int tail=(r.P-1)/B,cov=tail;for(int d=0;d<tail;d++)if(!pg.has(r.ids[d])){cov=d;break;}int hit=0;for(int d=cov;d>0;d--)if(a.has(~(ll)r.ids[d-1])){hit=d;break;}
  int known=hit;for(int d=tail;d>hit;d--)if(seen[r.ids[d-1]]){known=d;break;}int before=0;for(int d=known;d>max(known-64,0);d--)if(ends[r.ids[d-1]]){before=d;break;}
  set<int> kept={tail,hit};if(!before)kept.insert(known);if(hit&&hit==before&&hit<tail){kept.erase(hit);a.drop(~(ll)r.ids[hit-1]);}kept.erase(0);
  for(int d:kept)a.use(~(ll)r.ids[d-1],SB);for(int d=r.n;d>0;d--)pg.use(r.ids[d-1],PB);a.fit();pg.fit();for(int d=0;d<r.n;d++)seen[r.ids[d]]=1;if(tail)ends[r.ids[tail-1]]=1;out.push_back(hit*B);}
 return out;}
vector<int> vllm(const Trace&T,D S,D K){ // block 1056 = 16.5 blocks of 64: use ids at floor boundaries (1056 n / 64)
 int blk=(int)(ceil(SB/36/(KB/12)/16)*16);int sp=3;Lru pg;pg.cap=floor((S+K)/(blk*KB))-sp;vector<int> out;
 for(auto&r:T.r){int nb=(r.P+r.A)/blk;auto id=[&](int d){ll e=(ll)d*blk/B;return ((ll)r.ids[e-1])*64+(d*blk%B?1:0);};int tail=(r.P-1)/blk,cov=tail;for(int d=1;d<=tail;d++)if(!pg.has(id(d))){cov=d-1;break;}int hit=0;for(int d=cov;d>0;d--)if(pg.has(~id(d))){hit=d;break;}
  set<int> st={hit,cov,tail};st.erase(0);for(int d:st)pg.use(~id(d),sp);for(int d=nb;d>0;d--)pg.use(id(d),1);pg.fit();out.push_back(hit*blk);}
 return out;}
// ---------- engine
#ifndef NB
#define NB 28
#endif
 // age bins
struct Learn{ // hazard by class and age bin
 int C;vector<D> hits,expo;D gh[NB],ge[NB];vector<D> gi;D kap,grow;vector<D> edge;D decay;
 void init(int c,D k){C=c;kap=k;hits.assign(C*NB,0);expo.assign(C*NB,0);gi.assign(C*NB,1e-9);edge.resize(NB+1);edge[0]=0;for(int b=1;b<=NB;b++)edge[b]=8*pow(O("binf",1.6),b);}
 int bin(D a){int b=0;while(b<NB-1&&a>=edge[b+1])b++;return b;}
 void compute(){ // Gittins
  fill(gh,gh+NB,0);fill(ge,ge+NB,0);for(int c=0;c<C;c++)for(int b=0;b<NB;b++){gh[b]+=hits[c*NB+b];ge[b]+=expo[c*NB+b];}
  D H[NB];D last=1e-7;for(int b=0;b<NB;b++){D w=edge[b+1]-edge[b];H[b]=(gh[b]+0.02)/(ge[b]+0.02/max(last*0.5,1e-9)+ 0*w);last=H[b];}
  D hor=O("hor",0);
  for(int c=0;c<C;c++){D obs=0,ex=0;for(int b=0;b<NB;b++){obs+=hits[c*NB+b];ex+=expo[c*NB+b]*H[b];}D m=(obs+O("mp",1))/(ex+O("mp",1));
   D hz[NB];for(int b=0;b<NB;b++){D p=m*H[b];hz[b]=(hits[c*NB+b]+kap*1)/(expo[c*NB+b]+kap/p);}
   for(int b=0;b<NB;b++){D S=1,num=0,den=0,best=0;D start=sqrt(max(edge[b],1.0)*edge[b+1]);for(int i=b;i<NB;i++){D w=(i==b)?edge[i+1]-start:edge[i+1]-edge[i];D q=1-exp(-hz[i]*w);num+=S*q;den+=hz[i]>0?S*q/hz[i]:S*w;S*=1-q;best=max(best,num/den);if(hor>0&&edge[i+1]>start+hor)break;}
    gi[c*NB+b]=hor>0?num/den:best;}
  }}
};
struct Engine{
 const Trace&T;D S,K;int ns,nk; // capacities
 vector<int> par,dep;vector<char> kv,st,seen,lock;vector<int> nst,kch; // states in subtree
 // states
 struct E{int id,cls,uses;D t;D born;bool spare=false;};
 vector<E> es;vector<int> pos;vector<int> ep;unordered_map<int,unordered_set<int>> ech; // entry parent, children by id
 bool above(int a,int x){while(x&&dep[x]>dep[a])x=par[x];return x==a;}
 // index in es by id
 int nkv=0;D now=0;
 deque<int> dead; // pages without state
 vector<int> stampv;
 // turns
 struct Turn{int rank;bool gone;int answered;int tail;int cont;D adm;};
 unordered_map<int,Turn> turns;
 // ghosts
 struct G{int cls,uses;D t;int bin;int gen;int base;};
 unordered_map<int,G> gh;vector<deque<pair<int,int>>> gq;int gen=0;
 Learn L;string pol;mt19937 rng{(unsigned)O("seed",1)};
 D keptA=0.5,keptN=8,brA=0,brN=8;
 bool joint,coupled;D budget;
 int NCLS;
 Engine(const Trace&t,D s,D k):T(t),S(s),K(k){pol=OS("pol","git");joint=O("joint",0);coupled=O("coupled",1);par.assign(T.nid,0);dep.assign(T.nid,0);kv.assign(T.nid,0);st=seen=lock=kv;nst.assign(T.nid,0);pos.assign(T.nid,-1);kvlast.assign(T.nid,0);ep=par;krank=kv;kgen.assign(T.nid,0);
  ns=(int)(S/SB)-2;nk=(int)(K/(B*KB))-1;budget=S+K;NCLS=512;L.init(NCLS,O("kap",3));gq.resize(NB);L.compute();}
 D usedBytes(){return es.size()*SB+nkv*B*KB;}
 // kv lru for uncoupled
 vector<D> kvlast;vector<char> krank;vector<int> kgen;deque<pair<int,int>> kq[8];
 void addState(int id,int cls,int uses){if(!st[id]){st[id]=1;pos[id]=es.size();es.push_back({id,cls,uses,now,now});bool inner=nst[id]>0;int p=0;for(int x=par[id];x;x=par[x])if(st[x]){p=x;break;}ep[id]=p;if(inner){vector<int> mv;for(int c:ech[p])if(above(id,c))mv.push_back(c);for(int c:mv){ech[p].erase(c);ech[id].insert(c);ep[c]=id;}}ech[p].insert(id);for(int x=id;x;x=par[x])nst[x]++;}else{auto&e=es[pos[id]];e.cls=cls;e.uses=uses;e.t=now;}}
 int INH=O("inh",0);
 void rmState(int id){if(INH&&ep[id]){E&x=es[pos[id]];E&a=es[pos[ep[id]]];D px=prob(x),pa=prob(a);if(px>pa){a.cls=x.cls;a.t=x.t;if(INH==2)a.uses=x.uses;}}{int p=ep[id];ech[p].erase(id);auto i=ech.find(id);if(i!=ech.end()){for(int c:i->second){ep[c]=p;ech[p].insert(c);}ech.erase(id);}}int p=pos[id];st[id]=0;pos[id]=-1;es[p]=es.back();es.pop_back();if(p<(int)es.size())pos[es[p].id]=p;for(int x=id;x;x=par[x])nst[x]--;
   if(coupled)for(int x=id;x&&nst[x]==0;x=par[x])if(kv[x])dead.push_back(x);} // deepest first
 void rmKv(int id){kv[id]=0;nkv--;}
 int anc(int id){return ep[id];}
 int excl(int id){return nst[id]>1?0:dep[id]-dep[ep[id]];} // only for leaf entries: pages only this state needs
 D prob(const E&e){ // expected rate of reuse
   D age=now-e.t;
   if(pol=="lru")return 1/(age+1);
   if(pol=="lfu")return (e.uses+1);
   int b=L.bin(age);return L.gi[e.cls*NB+b];}
 vector<D> weight=vector<D>(6,1);D gapm;
 D scoreState(const E&e){ // low evicted: state slot
   if(pol=="lru")return e.t; 
   if(pol=="cur"){D w=weight[e.cls];return -(now-e.t+gapm)/w;}
   if(pol=="gdsf"){return e.born+ (e.uses+1)*(dep[e.id]-dep[anc(e.id)]);} // born holds inflation L
   D g=dep[e.id]-dep[anc(e.id)];
   return prob(e)*pow(g,O("gexp",1));}
 D Linf=0;
 D scoreKv(const E&e){static int SAME=O("same",0);if(SAME)return scoreState(e);if(pol=="lru")return e.t;if(pol=="cur")return scoreState(e);if(pol=="gdsf"){D x=max(excl(e.id),1);return e.born+(e.uses+1)*(dep[e.id]-dep[anc(e.id)])/x*100;}
   D x=excl(e.id);D g=dep[e.id]-dep[anc(e.id)];return prob(e)*g/max(x,1.0);}
 D scoreJoint(const E&e){if(pol=="lru")return e.t;D x=excl(e.id);D g=dep[e.id]-dep[anc(e.id)];return prob(e)*g/(x*B*KB+SB);}
 int SPR=O("spr",0);deque<int> spq;
 int samp=0;vector<int> cand[3];int kind=0;
 template<class F,class Q> int argmin(F f,Q ok){ if(SPR){for(size_t n=0;n<spq.size();){int x=spq[n];if(!st[x]||!es[pos[x]].spare){spq.erase(spq.begin()+n);continue;}if(!lock[x]&&(ok(es[pos[x]]))&&(kind!=1||nst[x]==1)){return pos[x];}n++;}}int best=-1;D bs=1e300;static int SP=O("samp",0),PL=O("pool",0);samp=SP;static int HD=O("heads",0);if(HD){map<int,int> hd;for(int i=0;i<(int)es.size();i++){auto&e=es[i];if(lock[e.id]||!ok(e))continue;int k=e.cls*32+(kind==1||HD==2?0:(int)(log2(max(dep[e.id]-dep[anc(e.id)],1))));auto it=hd.find(k);if(it==hd.end()||es[it->second].t>e.t)hd[k]=i;}for(auto&[k,i]:hd){D s=f(es[i]);if(s<bs){bs=s;best=i;}}return best;}if(samp&&PL&&(int)es.size()>samp+PL){vector<int>&c=cand[kind];set<int> ids;for(int x:c)if(st[x])ids.insert(x);for(int k=0;k<samp;k++)ids.insert(es[rng()%es.size()].id);vector<pair<D,int>> v;for(int x:ids){auto&e=es[pos[x]];if(lock[x]||!ok(e))continue;v.push_back({f(e),x});}if(!v.empty()){sort(v.begin(),v.end());c.clear();for(int k=1;k<(int)v.size()&&k<=PL;k++)c.push_back(v[k].second);lastScore=v[0].first;return pos[v[0].second];}}if(samp&&(int)es.size()>samp){for(int k=0;k<samp;k++){int i=rng()%es.size();auto&e=es[i];if(lock[e.id]||!ok(e))continue;D s=f(e);if(s<bs){bs=s;best=i;}}if(best>=0)return best;}
   for(int i=0;i<(int)es.size();i++){auto&e=es[i];if(lock[e.id]||!ok(e))continue;D s=f(e);if(s<bs||(s==bs&&dep[e.id]>dep[es[best].id])){bs=s;best=i;}}if(best>=0)lastScore=bs;return best;}
 D lastScore=0;
 bool evictState(){kind=0;int i=argmin([&](const E&e){return scoreState(e);},[&](const E&e){return true;});if(i<0)return false;if(pol=="gdsf")Linf=max(Linf,lastScore);rmState(es[i].id);return true;}
 bool evictLeaf(){static int ANY=O("any",0);kind=1;int i=argmin([&](const E&e){return joint?scoreJoint(e):scoreKv(e);},[&](const E&e){return ANY||nst[e.id]==1;});if(i<0)return false;if(pol=="gdsf")Linf=max(Linf,lastScore);rmState(es[i].id);return true;}
 bool popDead(){while(!dead.empty()){int x=dead.front();dead.pop_front();if(kv[x]&&nst[x]==0&&!lock[x]){rmKv(x);return true;}}return false;}
 bool evictJoint(){if(popDead())return true;kind=2;
   // any entry: inner ones cost a state only
   int i=argmin([&](const E&e){D g=dep[e.id]-dep[anc(e.id)];D x=nst[e.id]==1?excl(e.id):0;if(pol=="lru")return e.t;return prob(e)*g/(x*B*KB+SB);},[&](const E&e){return true;});if(i<0)return false;rmState(es[i].id);return true;}
 bool roomKv(int need){if(joint){while(usedBytes()+need*B*KB>budget-2*SB)if(!evictJoint())return false;return true;}
   while(nkv+need>nk){if(coupled){if(popDead())continue;if(!evictLeaf())return false;}
    else{ // lru by list (rank lists for cur)
     int bl=-1;D bs=-1;for(int q=0;q<8;q++){while(!kq[q].empty()){auto[x,g]=kq[q].front();if(!kv[x]||kgen[x]!=g){kq[q].pop_front();continue;}break;}
       if(kq[q].empty())continue;int x=kq[q].front().first;if(lock[x]){continue;}D c=(now-kvlast[x]+gapm)/(pol=="cur"?weight[q]:1);if(c>bs){bs=c;bl=q;}}
     if(bl<0)return false;int x=kq[bl].front().first;kq[bl].pop_front();rmKv(x);if(st[x])rmState(x);}
   }return true;}
 bool roomState(){if(joint){while(usedBytes()+SB>budget-2*SB)if(!evictJoint())return false;return true;}
   while((int)es.size()>=ns)if(!evictState())return false;return true;}
 // ghosts
 void gadd(int id,int cls,int uses){auto&g=gh[id];g.cls=cls;g.uses=uses;g.t=now;g.bin=0;g.gen=++gen;gq[0].push_back({id,gen});
   if((int)gh.size()>O("ghosts",65536)){}}
 void gadvance(){for(int b=0;b<NB;b++)while(!gq[b].empty()){auto[id,g]=gq[b].front();auto i=gh.find(id);if(i==gh.end()||i->second.gen!=g||i->second.bin!=b){gq[b].pop_front();continue;}if(now-i->second.t<L.edge[b+1])break;gq[b].pop_front();L.expo[i->second.cls*NB+b]+=L.edge[b+1]-L.edge[b];if(b+1<NB){i->second.bin=b+1;gq[b+1].push_back({id,g});}else gh.erase(i);}}
 void gsettle(int id,bool hit){auto i=gh.find(id);if(i==gh.end())return;auto&g=i->second;D a=now-g.t;L.expo[g.cls*NB+g.bin]+=max(a-L.edge[g.bin],0.0);if(hit)L.hits[g.cls*NB+g.bin]+=1;}
 int mkcls(int kind,int turn,int origin,int added,int uses){ // kind 0 end,1 junction
  string f=OS("cls","kotau");int c=0;if(f.find('K')!=string::npos)c=c*3+kind;else if(f.find('k')!=string::npos)c=c*2+(kind==1);if(f.find('t')!=string::npos)c=c*5+min(turn,5)-1;if(f.find('o')!=string::npos)c=c*3+origin;if(f.find('a')!=string::npos)c=c*4+added;if(f.find('u')!=string::npos)c=c*3+min(uses,2);return c;}
 struct Rate{D b=8,g;D odds(){return (g+1)/(max(b-g,0.0)+1);}};vector<Rate> rates;
 vector<int> run(){
  vector<int> out;int reqn=0;NCLS=1024;L.init(NCLS,O("kap",3));L.compute();gapm=nk/2.0;D gapN=8;
  D fr[5]={.25,.4,.5,.6,.7};for(int i=0;i<5;i++)rates.push_back({8,8*fr[i]});bool cur=pol=="cur";
  struct Meta{int kind,turn,origin,added;};unordered_map<int,Meta> meta;
  for(auto&r:T.r){reqn++;
   const int*ids=r.ids;int n=r.n;for(int d=0;d<n;d++){if(!dep[ids[d]]){dep[ids[d]]=d+1;par[ids[d]]=d?ids[d-1]:0;}}
   int limit=min((r.P-1)/B,n),cov=limit;for(int d=0;d<limit;d++)if(!kv[ids[d]]){cov=d;break;}
   int hit=0;for(int d=cov;d>0;d--)if(st[ids[d-1]]){hit=d;break;}
   int junc=0;for(int d=limit;d>hit;d--)if(seen[ids[d-1]]){junc=d;break;}
   out.push_back(hit*B);if(hit)es[pos[ids[hit-1]]].spare=false;
   int shared=max(hit,junc);
   // turn
   int before=0;for(int d=shared;d>max(shared-64,0);d--)if(turns.count(ids[d-1])){before=d;break;}
   int tail=limit;Turn tn;tn.rank=1;tn.gone=false;tn.answered=0;tn.tail=tail;tn.adm=now;int origin=0;bool atend=false;int added=r.P-shared*B;int ab=added<320?0:added<1088?1:added<4160?2:3;
   if(before){auto&l=turns[ids[before-1]];origin=l.gone?2:1;brA+=(l.gone-brA)/(brN=min(brN+1,64.0));if(l.answered>l.tail)keptA+=((shared>=l.answered)-keptA)/(keptN=min(keptN+1,64.0));
     if(!l.gone){l.gone=true;rates[l.rank-1].g++;gapm+=(now-l.adm-gapm)/(gapN=min(gapN+1,64.0));}
     if(cur){if(added<=1024+B)tn.rank=min(l.rank+1,5);}else tn.rank=min(l.rank+1,5);
     atend=(shared==before||shared==l.answered);}
   if(cur){auto&q=rates[tn.rank-1];q.b++;if(q.b>1024){q.b/=2;q.g/=2;}weight[0]=1;for(int i=0;i<5;i++)weight[i+1]=2*max(rates[i].odds()/rates[0].odds(),1.0);}
   if(tail)turns[ids[tail-1]]=tn;
   // ghosts: deepest record on path
   if(!cur){gadvance();int gd=0;for(int d=limit;d>0;d--)if(gh.count(ids[d-1])){gd=d;break;}
    if(gd){int id=ids[gd-1];gsettle(id,true);auto&m=meta[id];int u=gh[id].uses+1;int c=mkcls(m.kind,m.turn,m.origin,m.added,u);gadd(id,c,u);if(st[id]){auto&e=es[pos[id]];e.cls=c;e.uses=u;e.t=now;if(pol=="gdsf")e.born=Linf;}}
    static int RS=O("rs",0);if(RS&&hit&&hit!=gd&&gh.count(ids[hit-1])){int id=ids[hit-1];auto&g=gh[id];auto&e=es[pos[id]];if(RS==1){e.cls=g.cls;e.uses=g.uses;e.t=g.t;}else{gsettle(id,true);auto&m=meta[id];int u=g.uses+1;int c=mkcls(m.kind,m.turn,m.origin,m.added,u);gadd(id,c,u);e.cls=c;e.uses=u;e.t=now;}}
    if(hit&&hit!=gd&&OS("pol","")!="git"){auto&e=es[pos[ids[hit-1]]];e.t=now;e.uses++;e.born=Linf;}
    int every=O("every",64);if(reqn%every==0){L.compute();D dc=O("decay",1);if(dc<1)for(auto&x:L.hits)x*=dc;if(dc<1)for(auto&x:L.expo)x*=dc;}}
   else if(hit){auto&e=es[pos[ids[hit-1]]];e.t=now;e.cls=max(e.cls,2);}
   // lock path
   for(int d=0;d<hit;d++)lock[ids[d]]=1;
   for(int d=hit;d<cov;d++)lock[ids[d]]=1; // coverage pages are held
   int need=0;for(int d=0;d<n;d++)if(!kv[ids[d]])need++;
   bool ok=roomKv(need+1);
   for(int d=0;d<n;d++)lock[ids[d]]=1;
   if(!ok){for(int d=0;d<n;d++)lock[ids[d]]=0;continue;}
   for(int d=0;d<n;d++){int x=ids[d];if(!kv[x]){kv[x]=1;nkv++;}seen[x]=1;}
   now+=n-hit;
   // store
   auto store=[&](int d,int kind,int uses){if(d<=0)return;int id=ids[d-1];if(st[id])return;if(!roomState())return;int c;if(cur)c=kind==1?max(tn.rank,2):tn.rank;else c=mkcls(kind,tn.rank,origin,ab,uses);addState(id,c,uses);if(pol=="gdsf")es[pos[id]].born=Linf;};
   int end=(r.P+r.A-1)/B;end=min(end,n);
   bool wantJ=junc&&!(before&&atend);
   if(wantJ&&junc<tail)store(junc,1,0);
   // settle: which of tail and end
   static D UF=O("uf",0.05);bool keepTail=true,keepEnd=false;
   if(end>tail){bool useEnd=keptA*end>tail;if(useEnd){keepEnd=true;keepTail=!((1-keptA)*tail<UF*end);}else keepEnd=!(keptA*(end-tail)<UF*end);}
   if(tail&&turns.count(ids[tail-1]))turns[ids[tail-1]].answered=n;
   static int STP=O("step",0);vector<int> steps;if(STP)for(int d=hit+128;d<tail;d+=128)if(d!=junc)steps.push_back(d);
   for(int d:steps){int id=ids[d-1];if(st[id])continue;int c=mkcls(2,tn.rank,origin,ab,0);
     if((joint?usedBytes()+SB>budget-2*SB:(int)es.size()>=ns)&&STP!=2){int p=0;for(int x=par[id];x;x=par[x])if(st[x]){p=x;break;}D own=L.gi[c*NB]*(d-dep[p]);kind=joint?2:0;
       if(joint)own/=SB;
       D worst=1e300;int nsmp=0;for(int k=0;k<32;k++){auto&e=es[rng()%es.size()];if(lock[e.id])continue;if(e.spare){worst=-1;break;}D v=joint?prob(e)*(dep[e.id]-dep[anc(e.id)])/((nst[e.id]==1?excl(e.id):0)*B*KB+SB):scoreState(e);worst=min(worst,v);}
       if(own<=worst)continue;}
     store(d,2,0);}
   if(keepTail)store(tail,0,0);else if(SPR&&tail){bool had=st[ids[tail-1]];store(tail,0,0);if(st[ids[tail-1]]&&(!had||1)){es[pos[ids[tail-1]]].spare=true;spq.push_back(ids[tail-1]);}}
   if(keepEnd)store(end,0,0);else if(SPR&&end>tail){bool had=st[ids[end-1]];store(end,0,0);if(!had&&st[ids[end-1]]){es[pos[ids[end-1]]].spare=true;spq.push_back(ids[end-1]);}}
   if(keepTail&&tail&&st[ids[tail-1]])es[pos[ids[tail-1]]].spare=false;if(keepEnd&&st[ids[end-1]])es[pos[ids[end-1]]].spare=false;
   static int DR=O("drop",0);if(cur||DR){bool branching=brA>0.1;if(before&&before<tail&&!branching){int id=ids[before-1];if(st[id]&&1){lock[id]=0;rmState(id);}
       int la=turns[ids[before-1]].answered; (void)la;}}
   if(!cur){ // ghosts for stored positions
     auto ga=[&](int d,int kind){if(d<=0)return;int id=ids[d-1];if(gh.count(id))return;meta[id]={kind,tn.rank,origin,ab};gadd(id,mkcls(kind,tn.rank,origin,ab,0),0);};
     if(wantJ&&junc<tail)ga(junc,1);for(int d:steps)ga(d,2);if(keepTail)ga(tail,0);if(keepEnd)ga(end,0);}
   for(int d=0;d<n;d++)lock[ids[d]]=0;
   if(coupled)for(int d=n;d>0;d--){if(nst[ids[d-1]]==0)dead.push_back(ids[d-1]);else break;}
   else for(int d=n;d>0;d--){int x=ids[d-1];kvlast[x]=now;kgen[x]++;char rk=cur?max((int)krank[x],tn.rank):0;krank[x]=rk;kq[(int)rk].push_back({x,kgen[x]});}
  }
  return out;}
};
int main(int argc,char**argv){vector<string> files;vector<pair<D,D>> bud;string pols="git";D start=0;
 for(int i=1;i<argc;i++){string a=argv[i];size_t e=a.find('=');if(e!=string::npos)opt[a.substr(0,e)]=a.substr(e+1);else files.push_back(a);}
 string bs=OS("b","20+40");stringstream ss(bs);string tok;vector<string> bl;while(getline(ss,tok,','))bl.push_back(tok);
 start=O("start",0);pols=OS("pol","git");
 for(auto&f:files){Trace T=load(f.c_str());printf("%s",f.c_str());
  for(auto&b:bl){D s,k;
   if(b[0]=='q'){ // quarter etc: q0.25 of unbounded: run unbounded lru count: states=2/request distinct
     D fr=atof(b.c_str()+1);vector<char> sn(T.nid);ll tot=0,stt=0;vector<char> ss2(T.nid);for(auto&r:T.r){for(int d=0;d<r.n;d++)if(!sn[r.ids[d]]){sn[r.ids[d]]=1;tot++;}int tl=(r.P-1)/B;if(tl&&!ss2[r.ids[tl-1]]){ss2[r.ids[tl-1]]=1;stt++;}}
     D kf=fr;size_t p=b.find('/');if(p!=string::npos)kf=atof(b.c_str()+p+1);int mx=0;for(auto&r:T.r)mx=max(mx,r.n);s=max(stt*fr,6.0)*SB;k=max((D)tot*kf,(D)mx*2.)*B*KB;}
   else{sscanf(b.c_str(),"%lf+%lf",&s,&k);s*=1073741824.;k*=1073741824.;}
   vector<int> h;if(pols=="tail")h=tailLru(T,s,k,false);else if(pols=="tailj")h=tailLru(T,s,k,true);else if(pols=="vllm")h=vllm(T,s,k);else{Engine E(T,s,k);h=E.run();}
   ll hs=0,c=0;D t0=start;for(size_t i=0;i<h.size();i++)if(T.r[i].t>=t0&&T.r[i].t<O("stop",1e18)){hs+=h[i];c+=T.r[i].ceil_;}
   printf(" %.1f",100.*hs/c);}
  printf("\n");fflush(stdout);}
}
