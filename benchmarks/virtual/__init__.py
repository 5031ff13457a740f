"""Parts of virtual_cluster.py: nodes and links that one machine plays, and the end of their processes."""
