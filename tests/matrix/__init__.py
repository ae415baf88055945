"""Every instrument in every way of training, and the page that says so."""
