"""One run over several processes, of one computer or of several: started, joined, watched, started again."""
