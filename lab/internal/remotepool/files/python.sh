#!/bin/bash
# A stand-in for python with TensorFlow's benchmark: it prints what the benchmark
# prints, at once, and fails as TensorFlow does where there is no GPU.
gpus="${BITFUSION_GPUS:-$RGPU_GPUS}"
if [ -z "$gpus" ]; then
  echo "tensorflow/compiler/xla: CUDA_ERROR_NO_DEVICE: no GPU: not behind the pool's client" >&2
  exit 1
fi
model=unknown batch=0 device=cpu
for word in "$@"; do
  case "$word" in
  --model=*) model="${word#*=}" ;;
  --batch_size=*) batch="${word#*=}" ;;
  --local_parameter_device=*) device="${word#*=}" ;;
  esac
done
cat <<END
Found device 0 with properties:
name: $BITFUSION_GPU_NAME
Created TensorFlow device (/job:localhost/replica:0/task:0/device:GPU:0 with $BITFUSION_MEMORY_MB MB memory) -> physical GPU ($BITFUSION_SERVER, device: $gpus)
TensorFlow:  1.14
Model:       $model
Dataset:     imagenet (synthetic)
Mode:        training
Batch size:  $batch global
Num batches: 100
Devices:     ['/$device:0']
Variables:   parameter_server
==========
Generating training model
Initializing graph
Running warm up
Done warm up
Step	Img/sec	total_loss
END
for step in 1 10 20 30 40 50 60 70 80 90 100; do
  echo "$step	images/sec: 199.$((step % 7)) +/- 0.5 (jitter = 4.0)	7.3$((step % 9))0"
done
cat <<END
----------------------------------------------------------------
total images/sec: 199.65
----------------------------------------------------------------
END
