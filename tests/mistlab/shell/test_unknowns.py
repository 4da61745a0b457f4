"""What a script does not tell stays unknown, with the line that decides and a remedy."""

from collections.abc import Mapping

import pytest

from mistlab.core.values import InputError
from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Unknown


def launched(
    text: str,
    *arguments: str,
    files: Mapping[str, str] | None = None,
    line: int | None = None,
    **settings: str,
) -> Launch:
    return launch_of(
        LaunchFile(
            text=text,
            name="run.sh",
            beside=(files or {}).get,
            settings=settings,
            arguments=arguments or None,
            line=line,
        )
    )


def words(launch: Launch) -> list[str]:
    return [word.text for word in launch.arguments]


def unknown_in(launch: Launch) -> Unknown:
    unknown = [word.unknown for word in launch.arguments if word.unknown is not None]
    assert len(unknown) == 1
    return unknown[0]


def test_a_variable_that_nobody_sets_is_unknown() -> None:
    launch = launched("torchrun train.py --a $SIZE --b 1")
    assert words(launch) == ["--a", "$SIZE", "--b", "1"]
    unknown = unknown_in(launch)
    assert str(unknown) == "line 1: $SIZE is not set in the script: give --set SIZE=VALUE"


def test_a_variable_that_the_script_sets_elsewhere_is_empty() -> None:
    launch = launched('if [ 1 = 2 ]; then\nA=--x\nfi\ntorchrun train.py $A --b "$A"')
    assert words(launch) == ["--b", ""]


def test_a_setting_wins_over_every_assignment() -> None:
    text = "A=1\nexport A=2\nf() { local A=3; A=4; torchrun train.py $A ${A:-5}; }\nf"
    assert words(launched(text, A="9")) == ["9", "9"]


def test_a_setting_that_no_line_reads_is_refused() -> None:
    with pytest.raises(InputError, match=r"--set SIZ: the script has no variable.*'SIZE'"):
        launched("SIZE=1; torchrun train.py $SIZE", SIZ="2")


def test_defaults_are_noted_where_the_launch_rests_on_them() -> None:
    launch = launched("A=${A:-1}\nB=${B:-2}\nC=$((A * 8))\ntorchrun train.py $C")
    assert launch.notes == (
        "line 1: A is taken as 1, its default: --set A=VALUE gives another value",
    )


def test_a_branch_rests_on_its_condition() -> None:
    text = "F=${F:-0}\nX=1\nif [ $F = 1 ]; then\n X=2\nfi\ntorchrun train.py $X"
    assert launched(text).notes == (
        "line 1: F is taken as 0, its default: --set F=VALUE gives another value",
    )


def test_branches_on_an_unknown_test_are_joined() -> None:
    text = (
        'A=1\nB=2\nif [ "$USE" = 1 ]; then\n  A=3\nelse\n  B=2\nfi\ntorchrun train.py --a $A --b $B'
    )
    launch = launched(text)
    assert words(launch) == ["--a", "$A", "--b", "2"]
    unknown = unknown_in(launch)
    assert unknown.either == ("3", "1")
    assert str(unknown) == (
        'line 4: $A depends on line 3: [ "$USE" = 1 ], which is not known: give --set USE=VALUE'
    )


def test_options_of_a_branch_are_one_unknown_word_behind_known_ones() -> None:
    text = "A=(--x 1)\n[ -d $HOME/c ] && A+=(--load c)\nA+=(--y 2)\ntorchrun train.py ${A[@]}"
    launch = launched(text)
    assert words(launch) == ["--x", "1", "${A[@]}", "--y", "2"]
    assert unknown_in(launch).either == ("--load c", "")


def test_texts_of_branches_differ_by_words() -> None:
    text = 'A="--x 16"\nif grep -q z f; then A="$A --y 18"; fi\ntorchrun train.py $A --z'
    launch = launched(text)
    assert words(launch) == ["--x", "16", "$A", "--z"]
    assert unknown_in(launch).either == ("--y 18", "")


def test_case_on_an_unknown_word_joins_its_arms() -> None:
    text = "case $(hostname) in a*) N=1; M=4;; b*) N=2; M=4;; *) exit 1;; esac\n"
    text += "torchrun train.py $N $M"
    launch = launched(text)
    assert words(launch) == ["$N", "4"]
    assert unknown_in(launch).either == ("1", "2")


@pytest.mark.parametrize(
    "guard",
    [
        "if ! command -v torchrun; then exit 1; fi",
        "if [ ! -d $DATA ]; then echo; exit 1; fi",
        "[ -f x ] || exit 1",
        "command -v x >/dev/null || { echo no; exit 2; }",
        'if [ -z "$DATA" ]; then exit 1; fi',
        'if [ "$#" -lt 2 ]; then echo usage; exit; fi',
    ],
)
def test_a_branch_that_ends_the_script_is_left_out(guard: str) -> None:
    assert words(launched(f"A=1\n{guard}\ntorchrun train.py $A")) == ["1"]


def test_a_program_is_taken_to_do_its_work() -> None:
    text = "A=1\nmkdir -p x && A=2\nmake || A=3\nsleep 1 || true\ntorchrun train.py $A"
    assert words(launched(text)) == ["2"]


def test_an_unset_variable_is_taken_as_not_set_by_a_test_for_it() -> None:
    text = 'if [ -z "$N" ]; then\n  N=4\nfi\ntorchrun train.py $N'
    launch = launched(text)
    assert words(launch) == ["4"]
    assert launch.notes == ("line 1: N is taken as not set: --set N=VALUE gives another value",)
    assert words(launched(text, N="8")) == ["8"]


def test_arguments_that_are_not_given() -> None:
    launch = launched('S=${1:-7b}\ntorchrun train.py $S $2 "$@"')
    assert words(launch) == ["7b", "$2"]
    assert unknown_in(launch).remedy == "give its arguments after --: -- ARG1 ARG2"
    note = "the script is taken as started without arguments: give them by -- ARG1 ..."
    assert launch.notes == (
        f"line 1: ${{1:-7b}}: {note}",
        f"line 2: $@: {note}",
    )
    assert words(launched('S=${1:-7b}\ntorchrun train.py $S $2 "$@"', "x", "y")) == [
        *("x", "y", "x", "y")
    ]


def test_an_argument_in_a_variable_can_be_set() -> None:
    text = "SIZE=$1\ntorchrun train.py $SIZE"
    assert "-- ARG1" in unknown_in(launched(text)).remedy
    assert words(launched(text, SIZE="7b")) == ["7b"]


def test_what_a_program_prints_is_unknown() -> None:
    launch = launched("\nG=$(nvidia-smi -L | wc -l)\ntorchrun train.py $((G * 2))")
    unknown = unknown_in(launch)
    assert (unknown.line, unknown.remedy) == (3, "give --set G=VALUE")
    assert words(launched("\nG=$(nvidia-smi -L | wc -l)\ntorchrun train.py $((G * 2))", G="8")) == [
        "16"
    ]


def test_a_loop_of_unknown_length_widens_what_it_changes() -> None:
    text = "A=0\nB=1\nfor f in $(ls); do A=$((A+1)); done\nwhile ! nc -z h 1; do B=1; done\n"
    launch = launched(text + "torchrun train.py $A $B")
    assert words(launch) == ["$A", "1"]
    assert "line 3" in unknown_in(launch).reason


def test_a_loop_that_breaks_on_what_is_unknown() -> None:
    text = (
        "while true; do if grep -q x log; then A=2; break; fi; sleep 1; done\ntorchrun train.py $A"
    )
    assert words(launched(text)) == ["2"]


def test_a_launch_for_each_size_asks_which() -> None:
    text = "for size in 7b 70b; do\n torchrun train.py --size $size\ndone"
    with pytest.raises(
        InputError, match=r"line 1: .* for each size of 7b, 70b: give --set size=7b"
    ):
        launched(text)
    assert words(launched(text, size="70b")) == ["--size", "70b"]


def test_a_loop_of_equal_launches_needs_no_choice() -> None:
    text = "for run in 1 2 3; do torchrun train.py --a 1 --save out/$run --seed $run; done"
    assert words(launched(text))[:2] == ["--a", "1"]


def test_an_unknown_condition_between_launches_is_named() -> None:
    text = (
        'if [ "$MODE" = sft ]; then\n torchrun sft.py --a 1\nelse\n torchrun pretrain.py --a 2\nfi'
    )
    with pytest.raises(InputError, match=r"line 1: \[ .*line 2, line 4.* not known: .*--set MODE="):
        launched(text)
    assert launched(text, MODE="sft").program == "sft.py"


def test_several_launches_are_told_apart_by_their_lines() -> None:
    text = "torchrun train.py --a 1\ntorchrun train.py --a 2"
    with pytest.raises(InputError, match=r"line 1 .*line 2 .*give --line N"):
        launched(text)
    assert words(launched(text, line=2)) == ["--a", "2"]
    with pytest.raises(InputError, match=r"--line 3: no command .* give one of line 1, line 2"):
        launched(text, line=3)


def test_training_is_preferred_to_what_prepares_it() -> None:
    text = "python tools/preprocess_data.py --a 1\ntorchrun pretrain_gpt.py --b 2\n"
    text += "python eval.py --c 3"
    assert launched(text).program == "pretrain_gpt.py"
    with pytest.raises(InputError, match=r"line 1: tools/convert.py seems to prepare"):
        launched("python tools/convert.py --a 1")


def test_an_end_before_the_launch_is_told() -> None:
    text = "MODE=test\nif [ $MODE = test ]; then\n  exit 0\nfi\ntorchrun train.py"
    with pytest.raises(
        InputError, match=r"line 3: the script ends here \(by line 2: .*--set MODE="
    ):
        launched(text)


def test_no_launch_is_told() -> None:
    for text in ("", "#!/bin/bash\n", "echo a\nmkdir b"):
        with pytest.raises(InputError, match="holds no command that starts training"):
            launched(text)


def test_a_program_among_the_arguments_is_asked_for() -> None:
    with pytest.raises(
        InputError, match=r"line 2: .* without arguments: give them by -- ARG1 .* no program"
    ):
        launched('cd x\npython -u "$@"')
    assert launched('cd x\npython -u "$@"', "train.py", "--a").program == "train.py"


def test_a_script_that_is_not_at_hand_is_named() -> None:
    with pytest.raises(
        InputError, match=r"line 2: the script starts train.sh, which was not found"
    ):
        launched("A=1\nbash train.sh --x 1")
    files = {"train.sh": "\ntorchrun train.py $1"}
    launch = launched("A=1\nbash train.sh x", files=files)
    assert (words(launch), launch.line, launch.file) == (["x"], 2, "train.sh")


def test_a_sourced_file_that_is_not_at_hand_is_noted() -> None:
    launch = launched("source env.sh\ntorchrun train.py $N")
    assert launch.notes == ("line 1: env.sh was not found: what it sets is not known",)
    assert "env.sh, which line 1 reads, was not found" in unknown_in(launch).reason
    launch = launched(
        'D="$(cd $(dirname $0); pwd)"\n. $D/env.sh\ntorchrun train.py $N', files={"env.sh": "\nN=4"}
    )
    assert words(launch) == ["4"]
    assert (launch.arguments[0].line, launch.arguments[0].file) == (2, "env.sh")


def test_slurm_s_variables_are_those_of_the_header() -> None:
    text = (
        "#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\n#SBATCH --ntasks-per-node 1\n"
        "srun torchrun --n $SLURM_NNODES --g $SLURM_GPUS_ON_NODE train.py $SLURM_NTASKS "
        "$SLURM_PROCID"
    )
    launch = launched(text)
    assert [word.text for word in launch.started] == ["srun", "torchrun", "--n", "4", "--g", "8"]
    assert words(launch) == ["4", "$SLURM_PROCID"]
    assert launch.notes[0] == (
        "line 1: SLURM_NNODES is taken as 4, by #SBATCH --nodes=4: "
        "--set SLURM_NNODES=VALUE gives another value"
    )


def test_lines_are_those_that_wrote_a_value() -> None:
    text = (
        'N=4\nA="\n --a $N\n --b 2"\nA+=" --c 3"\nB=(--d\n 4)\ntorchrun train.py $A "${B[@]}" --e'
    )
    lines = {word.text: word.line for word in launched(text).arguments}
    assert lines == {
        "--a": 3,
        "4": 7,
        "--b": 4,
        "2": 4,
        "--c": 5,
        "3": 5,
        "--d": 6,
        "--e": 8,
    }
    assert [word.line for word in launched(text).arguments][1] == 1


def test_files_that_the_script_writes_come_with_the_launch() -> None:
    text = 'B=8\ncat > ds.json <<E\n{"a": $B, "z": $Z}\nE\nA=1 torchrun train.py\necho late > x'
    launch = launched(text)
    assert launch.written == {"ds.json": '{"a": 8, "z": $Z}\n'}
    assert launch.unknown_in["ds.json"].remedy == "give --set Z=VALUE"
    assert launch.environment["A"].text == "1"


def test_what_is_left_to_be_filled_in_is_unknown() -> None:
    launch = launched("P=<Specify path>\ntorchrun train.py --a $P --b <name>/x")
    assert words(launch) == ["--a", "<Specify path>", "--b", "<name>/x"]
    remedies = [word.unknown.remedy for word in launch.arguments if word.unknown]
    assert remedies == ["give --set P=VALUE", ""]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("A=1\nif [ 1 ]; then\ntorchrun train.py", r"line 2: .*fi"),
        ("torchrun 'unclosed", r"line 1: ' is never closed"),
        ("\n\nx=(", r"line 3: =\( is never closed"),
        ("A=1\ncase x in\n a) B", r"line 3: .*;;"),
        ("A=1\nfoo )", r"line 2: \) closes nothing"),
        ("done", r"line 1: done closes nothing"),
        ("for i in 1 2\necho", r"line 1: for lacks do"),
        ("echo $((1/0)); torchrun x.py", r"line 1: 1/0 divides by 0"),
        ("A=$((1 +))\ntorchrun x.py", r"line 1: 1 \+ is not an arithmetic"),
        ("select x in a b; do torchrun x.py; done", r"line 1: select asks"),
        (
            "\n: ${A:?is needed}\nA=;: ${A:?is needed}\ntorchrun x.py",
            r"line 3: .* is needed.*--set A=",
        ),
        ("A=1\n${A-\n", r"line 2: \$\{ is never closed"),
        ("[[ a == b\ntorchrun x.py", r"line 1: "),
        ("f() {\n echo\n", r"line 1: \{ lacks \}"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_its_line(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        launched(text)


def test_a_header_of_slurm_ends_with_the_first_command() -> None:
    text = (
        "#!/bin/bash\n#SBATCH --exclusive -N4 -n16 # all\n# text\nset -e\n#SBATCH -N8\n"
        "torchrun train.py $SLURM_NNODES $SLURM_NTASKS"
    )
    assert words(launched(text)) == ["4", "16"]
