#### sums
torchrun train.py $((1+2*3)) $(((1+2)*3)) $((7/2)) $((-7/2)) $((-7%3)) $((2**10)) $((2**3**2))
#### variables
A=4; B=A; torchrun train.py $((A*2)) $(($A*2)) $((B+1)) $((${A}0))
#### bits
torchrun train.py $((5&3)) $((5|3)) $((5^3)) $((~5)) $((1<<4)) $((256>>3)) $((-1>>1))
#### comparisons
torchrun train.py $((3>2)) $((3<=2)) $((3==3)) $((3!=3)) $((1&&0)) $((1||0)) $((!0))
#### choices
A=5; torchrun train.py $((A>3?10:20)) $((A<3?10:A==5?30:40))
#### assignments
torchrun train.py $((A=5)) $((A+=2)) $((A*=3)) $A $((A<<=1)) $((A%=5)) $A
#### steps
A=5; torchrun train.py $((A++)) $A $((++A)) $((A--)) $((--A)) $((-A))
#### bases
torchrun train.py $((0x1F)) $((010)) $((2#101)) $((36#z)) $((16#ff))
#### the comma
torchrun train.py $((A=3, B=A*2, B+1))
#### skipped parts
A=0; (( 0 && (A=5) )); (( 1 || (A=6) )); torchrun train.py $A
#### arrays in sums
A=(3 4 5); I=1; torchrun train.py $((A[0]+A[I]*A[$I+1])) $(( ${A[2]} ** 2 ))
#### arrays counted
A=(1 1); ((A[1]+=5)); ((A[3]++)); torchrun train.py "${A[@]}"
#### commands of sums
A=1; (( A += 2 )); let "B = A * 2" C=B+1; let D=5; torchrun train.py $A $B $C $D
#### a sum as a condition
N=4; if (( N > 2 && N % 2 == 0 )); then S=even; else S=odd; fi; torchrun train.py $S
#### blanks and lines
torchrun train.py $(( 1 +
  2 )) $((    3   ))
#### sixty-four bits
torchrun train.py $((9223372036854775807+1)) $((1<<63)) $((2**62))
#### an unset name counts as nothing
A=; torchrun train.py $((A+1)) $((A*5))
#### unary signs
torchrun train.py $((- -3)) $((+3)) $((-2**2)) $((!5)) $((~-1))
#### empty
torchrun train.py $(( ))
#### in a slice
S=abcdef; I=1; torchrun train.py ${S:I*2:I+1}
#### quoted names
A=3; torchrun train.py $(( "$A" + 1 ))
#### expr and bc
torchrun train.py `expr 3 \* 4` $(echo "7*6" | bc) $(expr 17 / 5) $(echo "scale=2; 7/3" | bc)
#### seq
for i in $(seq 3); do S+="$i,"; done; torchrun train.py $S $(seq 2 2 6) $(seq -s, 3)
#### products of defaults
torchrun train.py $((${N:-4} * ${M:-8})) $(( ${TP:=2} * 2 )) $TP
