#### defaults
E=""; torchrun train.py ${X:-d} ${X-e} "${E:-f}" "${E-g}" ${E:-"a b"} ${X:-a b}
#### assigned defaults
: ${X:=4} ${Y=5}; torchrun train.py $X $Y
#### alternatives
A=1; E=; torchrun train.py ${A:+yes} ${E:+no} "${E+set}" ${Q:+no}end
#### lengths
A=hello; B=(1 2 3); torchrun train.py ${#A} ${#B[@]} ${#B} ${#B[1]}
#### suffixes
F=/a/b.c.d; torchrun train.py ${F%.*} ${F%%.*} ${F%/*} ${F%x}
#### prefixes
F=/a/b.c.d; torchrun train.py ${F#*/} ${F##*/} ${F#*.} ${F##*.}
#### replaced once and everywhere
F=a-b-c; torchrun train.py ${F/-/_} ${F//-/_} ${F/#a/x} ${F/%c/y} ${F//-} ${F//[ab]/z}
#### replaced slashes
F=a/b/c; torchrun train.py ${F//\//-} "${F/\//+}"
#### quoted pattern
F='a*b'; torchrun train.py "${F%'*'b}" "${F//'*'/x}"
#### slices
F=abcdefg; N=2; torchrun train.py ${F:2} ${F:1:3} ${F: -2} ${F:N:1+1} ${F:0:-2} ${F:$N:$((N+1))}
#### cases
F=aBcD; torchrun train.py ${F^^} ${F,,} ${F^} ${F,}
#### indirect
A=5; P=A; Q=B; B=(7 8); R="B[1]"; torchrun train.py ${!P} ${!Q} ${!R}
#### nested defaults
B=7; torchrun train.py ${A:-${B:-9}} ${C:-$((B*2))} ${D:-$(echo sub)}
#### array values
A=(1 "2 3" 4); torchrun train.py "${A[@]}" ${A[@]} "${A[*]}" ${A[1]} "${A[1]}" $A
#### array appended
A=(a b); A+=(c "d e"); A[7]=z; torchrun train.py "${A[@]}" ${#A[@]} "${!A[@]}"
#### array element appended
A=(a b); A[1]+=x; S=p; S+=q; torchrun train.py "${A[@]}" $S
#### array slices
A=(a b c d e); torchrun train.py "${A[@]:1:2}" ${A[@]:3} "${A[@]: -1}" ${A[-1]}
#### array of keys
A=([2]=x [0]=y z); torchrun train.py "${A[@]}" "${!A[@]}"
#### an associative array
declare -A M=([a]=1 [b c]=2); M[d]=3; K=a; torchrun train.py ${M[a]} "${M[b c]}" ${M[d]} ${M[$K]} ${#M[@]}
#### an associative array's values
declare -A M; M[x]=1; torchrun train.py "${M[@]}" "${!M[@]}" ${M[none]:-no}
#### array of a variable's words
L="1 2 3"; A=($L); torchrun train.py ${A[2]} ${#A[@]}
#### array of a substitution
A=($(echo 4 5 6)); torchrun train.py "${A[@]}"
#### array patterns
A=(x.json y.json); torchrun train.py "${A[@]%.json}" "${A[@]/#/--f=}"
#### an empty array vanishes
A=(); torchrun train.py "${A[@]}" ${A[@]} "a${A[@]}b" end
#### values joined inside a word
A=(1 2); torchrun train.py "x${A[@]}y" "x${A[*]}y"
#### joined by ifs
A=(1 2 3); IFS=,; torchrun train.py "${A[*]}"
#### joined in a function
join() { local IFS=$1; shift; echo "$*"; }
torchrun train.py $(join , a b c)
#### arguments | -- a "b c" d
torchrun train.py "$@" $# $1 "$2" "$*"
#### arguments set
set -- x "y z"; torchrun train.py "$@" $#; 
#### arguments shifted | -- a b c d
shift; A=$1; shift 2; torchrun train.py $A "$@"
#### arguments past nine | -- 1 2 3 4 5 6 7 8 9 10 11
torchrun train.py ${10} ${11} $1
#### argument default | -- 7b
SIZE=${1:-13b}; N=${2:-4}; torchrun train.py $SIZE $N
#### argument slices | -- a b c d
torchrun train.py "${@:2}" ${@:2:1} "${@: -1}"
#### unset
A=1; unset A; B=(1 2 3); unset B[1]; torchrun train.py ${A:-none} "${B[@]}"
#### prefix assignments
A=1; A=2 torchrun train.py $A
#### prefix for a function
f() { torchrun train.py $A; }; A=2 f
#### declare and typeset
declare X=1 Y="a b"; typeset Z=$X; readonly R=9; export E=$Y; torchrun train.py $X "$Y" $Z $R "$E"
#### declare an integer
declare -i N=3*4; N+=2; torchrun train.py $N
#### declare an array
declare -a A=(1 2); A+=(3); torchrun train.py "${A[@]}"
#### export keeps words together
V="a b"; export W=$V; torchrun train.py "$W"
#### a given value | SIZE=70b
SIZE=${SIZE:-7b}; torchrun train.py $SIZE
#### plus equals on nothing
OPTS+=" --a"; OPTS+=" --b 1"; torchrun train.py $OPTS
#### names by prefix
AB1=x; AB2=y; torchrun train.py ${!AB@}
#### replaced in every element
A=(a-b c-d); torchrun train.py "${A[@]//-/_}"
#### a quoted default with quotes
torchrun train.py "${X:-"a b"}" ${Y:-'c d'} "${Z:-'e'}"
#### colon plus with words
D=1; torchrun train.py ${D:+--flag "a b" $D}
#### read into an array
IFS=',' read -ra A <<< "x,y z,w"; torchrun train.py "${A[@]}" ${#A[@]}
#### mapfile
mapfile -t A <<< "l 1
l 2"; torchrun train.py "${A[@]}"
#### printf into a variable
printf -v N "%03d-%s" 7 x; torchrun train.py $N
