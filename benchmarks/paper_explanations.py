"""What docs/paper.md says about its numbers: written after looking at them."""

from __future__ import annotations

__all__ = ["FIGURES", "NETWORKS", "SCALE", "STRATEGIES"]

NETWORKS = """\
The graphs are not the same, and the optima tell by how much. Transformer agrees to 1 %, RNNLM to 6 %, more than half
of which is what moves between the layers: ours counts either way by itself, with blocks where the order of the axes
puts them; the tool takes twice the way there, with blocks placed by greatest overlap. On AlexNet that makes ours
cheaper, and so does that we reduce the gradient of a convolution's input as the tensor that it is, the tool once per
position of the kernel. Inception-v3 is a different price for one kind of layer: the tool treats batch normalisation
as layer normalisation, with a scale and a bias for every channel and pixel, and sums their gradients over the parts
of the batch. Convolutions and the fully connected layer cost the same in both, to three digits."""

STRATEGIES = {
    "alexnet": """\
conv 1-4: ours splits the channels of conv 3 and 4 in two beside 16 shards of the batch, which sends fewer gradients of
weights than 32 shards of the batch. conv 5: we split what it makes, the paper what it reads. fc 1: the splits are the
paper's (4 of n, 8 of c), only that c is three dims in our graph (channels, height, width) and is split in all of them.
fc 2, fc 3 and the softmax are the paper's.""",
    "inception_v3": """\
Up to module E the strategies agree, but for one convolution. In module E the paper splits the out-channels of every
convolution in two, ours mostly the in-channels: to split the out-channels, the gradient of what a convolution reads
has to be summed, to split the in-channels, what it makes; and module E reads up to 2048 channels to make 192 to 448.
That sends more partial sums of outputs and moves more between convolutions (the two negative numbers), and far fewer
gradients. The paper's tool prices normalisations otherwise (see Table I), and took its row under those prices.""",
    "rnnlm": """\
The paper splits the vocabulary of embedding and output 32 ways, ours 16 ways beside two shards of the batch: a
device's share of the embedding's output is half as large, and so are its all-reduce and what moves on to the LSTM.
The same holds by hand: 32 shards of the vocabulary cost the embedding 3.16e11 of arithmetic and 3.25e11 for the
all-reduce, at 5000 FLOP a word; ours 3.16e11, 1.57e11 and 0.64e11 for the gradients of the weights. The published row
is therefore not the optimum of these constants; nor is it of any other price of a word that we tried. The LSTM: both
use the two layers as a pipeline; ours has more shards of the batch, the paper also splits what a cell reads, which
costs partial sums.""",
    "transformer": """\
Embedding and output: the paper's rows use 16 of the 32 devices, ours all, which is where most of the difference lies:
arithmetic, the all-reduce of the embedding's output, and what moves from and to the shards of the batch. Attention:
ours has the two devices of a part of the batch do the same work (or one of them idle, at the same price) rather than
split the heads; that is more arithmetic, and saves more in the all-reduces that a split of heads needs. Feed forward
is the paper's in every layer.""",
}

FIGURES = """\
The order of the strategies is the paper's in most cases (counted above). How far they are apart is, too, for two of the
four models, on the 1080 Ti: Inception-v3 is within {inception} of the measurements and Transformer within {transformer}
on up to 32 devices ({most} on 64). RNNLM and AlexNet are predicted to gain ever more from 16 on, where the paper's
measurements shrink. Gradients are priced as our lowering sums them: small ones in buckets, along trees where these take
fewer messages, as NCCL does since 2.4. Mesh-TensorFlow, which the paper ran, sums each by itself. Time that no strategy
saves would shrink the speedups: added to data parallelism and to ours alike, {added} ms a step at 4 to
64 devices give AlexNet the paper's speedups on the 1080 Ti. What it is we cannot tell: the numbers of these machines
come from data sheets, nobody has calibrated the model on them, and neither the input nor the dispatch of ever smaller
operations to ever more devices from one process is in it. RNNLM at p = 4 is predicted far too low. Transformer's expert
is predicted below what was measured ({expert} against {measured} at p = 8); we do not know why. The paper has no bars
for the other four models. BIG LSTM under data parallelism fits no device of either cluster, so that its speedups are
over something that could not be run."""
"""With the numbers that `paper_document` fills in: they are those of the table above it."""

SCALE = """\
Data parallelism of the networks of convolutions gains next to nothing from 128 devices on: the arithmetic of a device
is a tenth of the step and shrinks; what is left are the overheads of operations, half of it, the gradients' bytes, and
the sums of the normalizations, each by itself. Ours splits fewer weights over so many devices, and still gains. One
weird trick splits the fully connected layers alone, which is no help there. BIG LSTM has the most weights for its
work."""
