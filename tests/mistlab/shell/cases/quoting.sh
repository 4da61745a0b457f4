#### plain words
torchrun --nnodes 2 train.py --a 1 --b x
#### continued line
torchrun --nnodes 2 \
  train.py \
  --a 1
#### comment behind a command
torchrun train.py --a 1 # --b 2
#### a hash inside a word
torchrun train.py --a x#y '#z'
#### single quotes
torchrun train.py --a 'x  y $Z "q"'
#### double quotes
Z=3; torchrun train.py --a "x  y $Z 'q' \"r\" \$Z \\ \n"
#### ansi quotes
torchrun train.py --a $'tab\there' $'it\'s' $'\x41\101é'
#### backslashes
torchrun train.py a\ b \$x \\ \"q\" \'s\'
#### adjacent quotes
X=7; torchrun train.py 'a'"b$X"c\ d$X'e'
#### empty words
E=""; torchrun train.py "" '' "$E" $E --end
#### splitting of a variable
A="--x 1   --y  2"; torchrun train.py $A "$A"
#### splitting at newlines
A="
  --x 1
  --y 2
"; torchrun train.py $A
#### splitting joins neighbours
A="a b c"; torchrun train.py pre$A-post "pre"$A"post"
#### ifs of commas
IFS=,; A="a,b,,c"; torchrun train.py $A
#### ifs of colons and blanks
IFS=": "; A="a : b:c  d"; torchrun train.py $A
#### globs stay
torchrun train.py *.nothing a?b [x]y
#### tilde in the middle
torchrun train.py a~b x=~y
#### braces
torchrun train.py {a,b}{1..3} x{1..5..2} {01..03} {c..a} {z} {,x}y
#### braces in quotes
torchrun train.py "{a,b}" '{1..2}' {"a b",c}
#### braces with variables
X=5; torchrun train.py {$X,b}-{1,2}
#### a semicolon and an ampersand
X=1; Y=2 ; torchrun train.py $X $Y & wait
#### quotes inside an assignment
A="--name 'a b'"; torchrun train.py $A
#### eval unquotes
A="--name 'a b'"; eval torchrun train.py $A
#### a carriage return in quotes
torchrun train.py "a	b" 'c	d'
#### dollar alone
torchrun train.py $ "$" a$ "a$"
#### nested quotes in substitution
X="a b"; torchrun train.py "$(echo "$X" 'c  d')"
#### backquotes
X=5; torchrun train.py `echo $X` "`echo \"q $X\"`"
#### percent and colon
torchrun train.py a:b=c,d@e%f ^g
#### a here-string
read -r A B <<< "3 4 5"; torchrun train.py "$A" "$B"
