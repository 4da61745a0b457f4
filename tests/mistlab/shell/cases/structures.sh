#### if and elif
S=13b; if [ $S = 7b ]; then L=32; elif [ "$S" == 13b ]; then L=40; else L=80; fi; torchrun train.py $L
#### if not
A=; if ! [ -n "$A" ]; then B=1; fi; if [ ! -z "$A" ]; then C=1; fi; torchrun train.py "$B" "$C"
#### number tests
A=5; for o in -eq -ne -lt -le -gt -ge; do if [ $A $o 5 ]; then R+=1; else R+=0; fi; done; torchrun train.py $R
#### joined tests
A=1; B=; if [ -n "$A" -a -z "$B" ]; then R=1; fi; if [ "$A" = 2 -o "$B" = "" ]; then R+=2; fi; torchrun train.py $R
#### bracket patterns
F=run_7b.sh; [[ $F == *7b* ]] && A=1; [[ $F == "*7b*" ]] || B=2; [[ $F != *.py && -n $F ]] && C=3; torchrun train.py $A $B $C
#### bracket numbers and groups
N=8; [[ ( $N -gt 4 || $N -eq 1 ) && ! $N -eq 9 ]] && A=in; [[ N -eq 8 ]] && B=bare; torchrun train.py $A $B
#### bracket expressions
V=12x34; if [[ $V =~ ^([0-9]+)x([0-9]+)$ ]]; then A=${BASH_REMATCH[1]}; B=${BASH_REMATCH[2]}; fi; torchrun train.py $A $B
#### bracket order
[[ abc < abd ]] && A=1; [[ b > a ]] && B=2; torchrun train.py $A $B
#### test by name
A=3; test $A -gt 2 && B=yes; test -z "$A" || C=no; torchrun train.py $B $C
#### set or not
A=; [[ -v A ]] && B=set; declare C; [ -n "${A+x}" ] && D=also; torchrun train.py $B $D
#### case
for S in 7b 13B x_70b other; do case $S in 7b|8b) R+=1;; *[bB]) case $S in 13*) R+=2;; *) R+=3;; esac;; (*) R+=4;; esac; done; torchrun train.py $R
#### case of quotes and classes
S='a*'; case $S in "a*") R=quoted;; esac; case x5 in [a-z][0-9]) R+=class;; esac; case A in [!a-z]) R+=not;; esac; torchrun train.py $R
#### case falls through
case a in a) R=1;& b) R+=2;; c) R+=3;; esac; case ab in a*) R+=4;;& *b) R+=5;; esac; torchrun train.py $R
#### for words
for x in a "b c" {1..2}; do R+="[$x]"; done; torchrun train.py "$R"
#### for arguments | -- p q
for x; do R+="$x-"; done; for y in "$@"; do R+="$y+"; done; torchrun train.py $R
#### for counting
for ((i=0, j=5; i<3; i++, j--)); do R+="$i$j "; done; torchrun train.py $R
#### while and until
i=0; while [ $i -lt 3 ]; do R+=$i; i=$((i+1)); done; until (( i == 0 )); do ((i--)); R+=x; done; torchrun train.py $R
#### break and continue
for i in 1 2 3 4 5; do [ $i = 2 ] && continue; [ $i = 4 ] && break; R+=$i; done; torchrun train.py $R
#### break two loops
for i in 1 2; do for j in a b; do R+=$i$j; [ $j = a ] && break 2; done; done; for i in 1 2; do for j in a b; do continue 2; done; R+=never; done; torchrun train.py $R
#### functions
f() { local a=$1; A=out; echo "$a-$#-$*"; return 3; }; X=$(f p "q r"); f z >/dev/null; torchrun train.py "$X" $? $A
#### function keyword
function g { echo g$1; }; function h() { g $1; }; torchrun train.py $(h 5)
#### local hides
x=1; f() { local x=2; g; }; g() { R=$x; x=3; }; f; torchrun train.py $R $x
#### recursion
fact() { if (( $1 <= 1 )); then echo 1; else echo $(( $1 * $(fact $(( $1 - 1 ))) )); fi; }; torchrun train.py $(fact 5)
#### function status
ok() { [ "$1" = y ]; }; if ok y; then R=1; fi; ok n || R+=2; torchrun train.py $R
#### and or
true && A=1; false || B=2; false && C=3; true || D=4; false && E=5 || F=6; torchrun train.py $A $B "$C" "$D" "$E" $F
#### groups and subshells
A=1; { A=2; B=3; }; ( A=9; B=9; exit 4 ); R=$?; torchrun train.py $A $B $R
#### pipelines
A=$(echo "x y z" | wc -w); B=$(printf 'b\na\n' | head -n 1); C=$(echo AbC | tr A-Z a-z); D=$(echo a,b,c | cut -d, -f2); torchrun train.py $A $B $C $D
#### while read
while read -r k v; do R+="$k=$v;"; done <<E
a 1
b 2 3
E
torchrun train.py "$R"
#### piped loop loses variables
R=0; echo a | while read x; do R=1; done; torchrun train.py $R
#### here-documents
X=5
cat > f.json <<E
{"a": $X, "b": "$((X*2))", "c": \$X}
E
cat > g.txt <<'E'
raw $X
E
cat <<-E > h.txt
	tabs $X
	E
torchrun train.py "$(cat f.json)" "$(cat g.txt)" "$(<h.txt)"
#### tee and echo to files
echo "A=7" > env.sh; echo "B=8" >> env.sh; printf 'C=%s\n' 9 | tee -a env.sh; source env.sh; . ./env.sh; torchrun train.py $A $B $C
#### sourced with arguments
cat > lib.sh <<'E'
S=$1; N=$#
f() { echo lib$1; }
return 0
S=never
E
source ./lib.sh p q; torchrun train.py $S $N $(f 1)
#### eval
N=A; eval "$N=5"; eval 'B=$A'; CMD="torchrun train.py \$A $B"; eval $CMD
#### a command in a variable
CMD="torchrun --nnodes 2 train.py"; A="--x 1"; $CMD $A
#### a command in an array
CMD=(torchrun --n "a b"); CMD+=(train.py); "${CMD[@]}" --y
#### bash -c
export A=5; B=6; bash -c "torchrun train.py $B \$A \${B:-none}"
#### bash -c with arguments
bash -c 'torchrun train.py $0 "$@"' zero one "two three"
#### a script beside
cat > inner.sh <<'E'
torchrun train.py "$@" $# ${EXP:-0} ${PLAIN:-none}
E
export EXP=1; PLAIN=2; bash inner.sh a "b c"
#### a script beside with a prefix
cat > inner.sh <<'E'
torchrun train.py $A
E
A=4 sh ./inner.sh
#### srun and bash -c
srun --nodes=2 --ntasks-per-node 1 bash -c 'torchrun train.py 5'
#### exec
A=1; exec torchrun train.py $A; torchrun other.py
#### env and nohup
env A=3 nohup torchrun train.py x
#### getopts | -- -a 5 -vb x rest
while getopts "a:vb:" o; do case $o in a) A=$OPTARG;; v) V=1;; b) B=$OPTARG;; esac; done; shift $((OPTIND-1)); torchrun train.py $A $V $B "$@"
#### long options by hand | -- --size 7b --flag --lr=1e-4 last
while [[ $# -gt 0 ]]; do case $1 in --size) S=$2; shift 2;; --flag) F=1; shift;; --lr=*) LR="${1#*=}"; shift;; *) P+=("$1"); shift;; esac; done; torchrun train.py $S $F $LR "${P[@]}"
#### basename and dirname
P=/a/b/c.sh; torchrun train.py $(basename $P) $(basename $P .sh) $(dirname $P) `dirname a`
#### set -e stops
set -e; A=1; false || A=2; torchrun train.py $A; false; torchrun second.py
#### status
false; A=$?; true; B=$?; [ 1 = 2 ]; torchrun train.py $A $B $?
#### exit in a function
f() { torchrun train.py 1; exit 0; }; f; torchrun train.py 2
#### negated pipeline
! false && A=1; ! true || B=2; torchrun train.py $A $B
#### redirections around
{ echo x; echo y; } > o.txt; torchrun train.py $(cat o.txt) > log 2>&1
#### piped to tee
torchrun train.py 1 2 2>&1 | tee out.log
#### in the background
torchrun train.py 1 & 
wait
#### printf formats
torchrun train.py "$(printf '%s-%d-%05.2f|%x' a 5 3.14159 255)" "$(printf '%s,' a b c)" "$(printf '%5s|%-5s|' ab cd)"
#### echo options
torchrun train.py "$(echo -n a; echo -e 'b\tc'; echo -E 'd\te')"
#### a loop over an array
A=(a b); for i in "${!A[@]}"; do R+="$i${A[$i]}"; done; for x in "${A[@]}"; do R+=$x; done; torchrun train.py $R
#### nested substitutions
torchrun train.py $(echo $(echo $(echo deep)) "$(echo "a $(echo b)")")
#### time and braces
time { A=1; }; torchrun train.py $A
#### functions see arguments of theirs | -- out
f() { echo "$1"; }; torchrun train.py $(f in) $1
#### read lines of a file
printf 'a=1\nb=2\n' > kv; while IFS='=' read -r k v; do declare "$k=$v"; done < kv; torchrun train.py $a $b
#### conditional assignment chain
[ -z "$A" ] && A=first; [ -z "$A" ] && A=second; A=${A:-third}; torchrun train.py $A
#### extended patterns
shopt -s extglob; F=foo12; torchrun train.py ${F%%+([0-9])} ${F##*(f|o)}
#### an if over lines
if [ 1 -eq 1 ] &&
   [ 2 -eq 2 ]
then
  A=yes
fi
torchrun train.py $A
#### colon loop
for i in 1 2; do :; done; torchrun train.py $i
#### number strings
A=08; [ $A -eq 8 ] && B=ten; torchrun train.py $B
#### export a function's variables
f() { export A=1; declare -g B=2; declare C=3; }; f; torchrun train.py $A $B ${C:-none}
#### trailing newlines are cut
A="$(printf 'x\n\n\n')"; torchrun train.py "[$A]"
