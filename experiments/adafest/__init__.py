"""AdaFEST (Ghazi et al., 2023): how few table values a private step may update, and what that costs."""
