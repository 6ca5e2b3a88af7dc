from workers.connection import Server


def test_printed_commands_have_the_options_of_their_server() -> None:
    assert Server("host:1").everburn_options == " --address host:1"
    assert Server("host:1", "lab").everburn_options == " --address host:1 --namespace lab"
    assert Server("host:1", of_folder=True).everburn_options == ""
