pub mod cell; pub mod record; 
