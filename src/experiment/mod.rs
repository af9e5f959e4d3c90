pub mod cell; pub mod record; pub mod units;
