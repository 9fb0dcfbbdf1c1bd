"""apex.RNN is refused: it was a study of recurrent layers in half precision, and torch's own have that since."""

raise ImportError(
    "apex.RNN (LSTM, GRU, ReLU, Tanh, mLSTM) is not part of preamp. torch.nn.LSTM, GRU and RNN take its place: at O1 "
    "they run in 16 bits, at O2 and O3 they are cast with the model"
)
