# Sourced: makes gsm8k/, arithmetic/ and base/ in the current folder, a Qwen2 of 105 M parameters trained from scratch for
# MINUTES on GSM8K train (SOURCE) and generated problems. What is there already is kept.
python3 -m verl_qerl doctor
# Half of the answers it is pretrained on end in another way, so that there is something to learn within some steps.
[[ -d gsm8k ]] || python3 -m verl_qerl data gsm8k --source "$SOURCE" --hash-share 0.5 --out gsm8k
[[ -d arithmetic ]] || python3 -m verl_qerl data arithmetic --num-train 30000 --max-number 60 --max-steps 3 \
    --hash-share 0.5 --out arithmetic
[[ -d base ]] || python3 -m verl_qerl pretrain --data gsm8k/train.jsonl arithmetic/train.jsonl --repeats 8 1 \
    --eval-data gsm8k/test.jsonl --size 100m --lr 1e-3 --minutes "$MINUTES" --compile --out base
