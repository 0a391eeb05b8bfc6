"""Links and what makes them: framed chunks between two peers, in memory or over stream sockets."""
